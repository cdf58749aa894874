//! Tests of the fair queue before the workers.

use super::*;
use crate::limits::testing::Random;

/// An oracle with the same order, which searches all waiters each time.
#[derive(Default)]
struct Oracle {
    waiting: Vec<(i32, usize, u64, u64, u64)>,
    /// Tag and virtual time of each priority, by (priority, tenant).
    tags: BTreeMap<(i32, usize), u128>,
    virtual_times: BTreeMap<i32, u128>,
}

impl Oracle {
    fn push(&mut self, priority: i32, tenant: usize, cost: u64, deadline: u64, serial: u64) {
        let is_new = !self.waiting.iter().any(|waiter| (waiter.0, waiter.1) == (priority, tenant));
        let time = *self.virtual_times.entry(priority).or_default();
        let tag = self.tags.entry((priority, tenant)).or_default();
        if is_new {
            *tag = time.max(*tag);
        }
        self.waiting.push((priority, tenant, cost, deadline, serial));
    }

    fn pop(&mut self, weights: &[u32]) -> Option<u64> {
        let priority = self.waiting.iter().map(|waiter| waiter.0).min()?;
        // Serials grow, so the first of a tenant is its head.
        let (tag, serial) = (0..weights.len())
            .filter_map(|tenant| {
                let head = self.waiting.iter().find(|waiter| (waiter.0, waiter.1) == (priority, tenant))?;
                Some((self.tags[&(priority, tenant)], head.4))
            })
            .min()?;
        self.virtual_times.insert(priority, tag);
        let index = self.waiting.iter().position(|waiter| waiter.4 == serial)?;
        let (_, tenant, cost, _, _) = self.waiting.remove(index);
        *self.tags.get_mut(&(priority, tenant))? +=
            u128::from(cost) * TOKEN_PARTS / u128::from(weights[tenant]);
        self.forget(priority);
        Some(serial)
    }

    fn remove(&mut self, index: usize) -> u64 {
        let (priority, _, _, _, serial) = self.waiting.remove(index);
        self.forget(priority);
        serial
    }

    fn forget(&mut self, priority: i32) {
        if !self.waiting.iter().any(|waiter| waiter.0 == priority) {
            self.tags.retain(|key, _| key.0 != priority);
            self.virtual_times.remove(&priority);
        }
    }
}

#[test]
fn it_serves_as_the_oracle_does() {
    let tenants: Vec<Arc<str>> = ["a", "b", "c", "d"].map(Arc::from).into();
    let weights = [1, 2, 5, 1];
    for seed in 0..40 {
        let mut random = Random(seed);
        let (mut queue, mut oracle) = (Queue::default(), Oracle::default());
        let mut tickets: Vec<Ticket> = Vec::new();
        for step in 0..3000 {
            match random.below(10) {
                0..5 if oracle.waiting.len() < 60 => {
                    let tenant = random.below(4) as usize;
                    let arrival = Arrival {
                        priority: random.below(2) as i32 - 1,
                        tenant: &tenants[tenant],
                        weight: weights[tenant],
                        cost: random.below(1000),
                        deadline: step + random.below(500),
                    };
                    let serial = queue.serial;
                    tickets.push(queue.push(&arrival, serial));
                    oracle.push(arrival.priority, tenant, arrival.cost, arrival.deadline, serial);
                }
                5 if !tickets.is_empty() => {
                    let ticket = tickets.swap_remove(random.below(tickets.len() as u64) as usize);
                    let index = oracle.waiting.iter().position(|waiter| waiter.4 == ticket.serial);
                    assert_eq!(queue.remove(&ticket), index.map(|index| oracle.remove(index)), "seed {seed}");
                    assert_eq!(queue.remove(&ticket), None);
                }
                6 => {
                    while let Some(serial) = queue.pop_expired(step) {
                        let index = (0..oracle.waiting.len())
                            .min_by_key(|&index| (oracle.waiting[index].3, oracle.waiting[index].4));
                        let index = index.expect("one waits");
                        assert!(oracle.waiting[index].3 <= step);
                        assert_eq!(serial, oracle.remove(index), "seed {seed}, step {step}");
                    }
                    assert!(oracle.waiting.iter().all(|waiter| waiter.3 > step));
                }
                _ => assert_eq!(queue.pop(), oracle.pop(&weights), "seed {seed}, step {step}"),
            }
            assert_eq!(queue.len(), oracle.waiting.len());
            assert_eq!(queue.cost(), oracle.waiting.iter().map(|waiter| waiter.2).sum::<u64>());
            assert_eq!(queue.places.len(), queue.deadlines.len());
            for class in queue.classes.values() {
                assert!(class.waiting > 0 && class.heads.len() <= class.flows.len());
                let active = class.flows.values().filter(|flow| !flow.waiting.is_empty());
                assert_eq!(class.weight, active.map(|flow| u64::from(flow.weight)).sum::<u64>());
            }
        }
    }
}

fn serve(weights: &[u32], costs: &[u64], rounds: u64) -> Vec<u64> {
    let tenants: Vec<Arc<str>> = (0..weights.len()).map(|index| index.to_string().into()).collect();
    let mut queue = Queue::default();
    let mut served = vec![0; weights.len()];
    let push = |queue: &mut Queue<usize>, index: usize| {
        let (tenant, weight, cost) = (&tenants[index], weights[index], costs[index]);
        queue.push(&Arrival { priority: 0, tenant, weight, cost, deadline: u64::MAX }, index);
    };
    for index in 0..weights.len() {
        (0..3).for_each(|_| push(&mut queue, index));
    }
    for _ in 0..rounds {
        let index = queue.pop().expect("always somebody");
        served[index] += costs[index];
        push(&mut queue, index);
    }
    served
}

#[test]
fn tokens_are_shared_by_weight_whatever_the_requests_cost() {
    for costs in [[100, 100, 100], [1000, 10, 100], [7, 4000, 90]] {
        let served = serve(&[1, 2, 4], &costs, 50_000);
        let total: u64 = served.iter().sum();
        for (index, share) in [1.0 / 7.0, 2.0 / 7.0, 4.0 / 7.0].into_iter().enumerate() {
            let got = served[index] as f64 / total as f64;
            assert!((got / share - 1.0).abs() < 0.02, "{costs:?}: {served:?}");
        }
    }
}

#[test]
fn a_full_queue_of_one_tenant_is_not_ahead_of_another() {
    let (heavy, light): (Arc<str>, Arc<str>) = ("heavy".into(), "light".into());
    let mut queue = Queue::default();
    let arrival = |tenant, priority| Arrival { priority, tenant, weight: 1, cost: 100, deadline: 9 };
    for serial in 0..50 {
        assert_eq!(queue.cost_ahead(&arrival(&heavy, 0)), serial * 100);
        queue.push(&arrival(&heavy, 0), ());
    }
    assert_eq!(queue.cost_ahead(&arrival(&light, 0)), 100);
    assert_eq!(queue.cost_ahead(&arrival(&light, 1)), 5000, "a worse priority waits for all");
    assert_eq!(queue.cost_ahead(&arrival(&light, -1)), 0);
    queue.push(&arrival(&light, 0), ());
    assert_eq!(queue.cost_ahead(&arrival(&light, 0)), 300);
    assert_eq!((queue.tenant_len(0, "heavy"), queue.tenant_len(0, "light")), (50, 1));
}

#[test]
fn memory_of_the_absent_is_bounded() {
    let mut queue = Queue::default();
    let stays: Arc<str> = "stays".into();
    queue.push(&Arrival { priority: 0, tenant: &stays, weight: 1, cost: 1 << 40, deadline: 9 }, ());
    queue.push(&Arrival { priority: 0, tenant: &stays, weight: 1, cost: 1, deadline: 9 }, ());
    queue.pop();
    for number in 0..10_000 {
        let tenant: Arc<str> = number.to_string().into();
        queue.push(&Arrival { priority: 0, tenant: &tenant, weight: 1, cost: 1, deadline: 9 }, ());
        queue.pop();
    }
    assert!(queue.classes[&0].flows.len() <= FLOWS_SPARE + 4);
}
