//! Scaling policies of peers, reimplemented from their guides and sources, for comparison.
//!
//! | Law | Source |
//! | --- | --- |
//! | KEDA queue | `llm-d/llm-d` `guides/workload-autoscaling`: queue 1, running 16, the larger; HPA's behaviour with 300 s down |
//! | llm-d SLO | the same guide, SLO-aware: p90 latencies over the service level, up above 0.55, down below 0.40 |
//! | token-aware | the same guide: prompt tokens in flight over the measured speed, KV in use 0.8 |
//! | Dynamo threshold | `ai-dynamo` 1.6.1 `planner/core/load_scaling.py`: one step at a time, held while a worker starts |
//! | clairvoyant | knows the demand one start ahead, and one worker's capacity; aims at the capacity, without headroom |

use crate::{FleetView, ScalingPolicy};

/// Seconds between two ticks of an HPA.
const HPA_INTERVAL: f64 = 15.0;

/// Replica count of a HorizontalPodAutoscaler that follows a metric's desired count.
#[derive(Debug, Clone)]
struct Hpa {
    up_pods: u32,
    up_period: f64,
    up_stabilisation: f64,
    down_pods: u32,
    down_period: f64,
    down_stabilisation: f64,
    asked: Vec<(f64, u32)>,
    last_up: f64,
    last_down: f64,
}

impl Hpa {
    /// KEDA's defaults: up at once by doubling or four pods, down after 300 s.
    fn keda() -> Self {
        Self {
            up_pods: 4,
            up_period: 15.0,
            up_stabilisation: 0.0,
            down_pods: 100,
            down_period: 15.0,
            down_stabilisation: 300.0,
            asked: Vec::new(),
            last_up: f64::NEG_INFINITY,
            last_down: f64::NEG_INFINITY,
        }
    }

    fn llm_d() -> Self {
        Self {
            up_period: 60.0,
            up_stabilisation: 30.0,
            down_pods: 1,
            down_period: 120.0,
            down_stabilisation: 180.0,
            ..Self::keda()
        }
    }

    fn follow(&mut self, now: f64, count: u32, asked: u32) -> u32 {
        self.asked.push((now, asked));
        let within = |seconds: f64| {
            self.asked.iter().rev().take_while(move |ask| ask.0 > now - seconds - 1e-9).map(|ask| ask.1)
        };
        let up = within(self.up_stabilisation).min().unwrap_or(asked);
        let down = within(self.down_stabilisation).max().unwrap_or(asked);
        if up > count {
            if now - self.last_up < self.up_period {
                return count;
            }
            self.last_up = now;
            return up.min(count + self.up_pods.max(count));
        }
        if down < count {
            if now - self.last_down < self.down_period {
                return count;
            }
            self.last_down = now;
            return down.max(count.saturating_sub(self.down_pods));
        }
        count
    }
}

/// A constant count.
pub struct Static(pub u32);

impl ScalingPolicy for Static {
    fn interval(&self) -> f64 {
        HPA_INTERVAL
    }

    fn wanted(&mut self, _: &FleetView<'_>) -> u32 {
        self.0
    }
}

/// KEDA's policy on queue length and running requests.
pub struct KedaQueue(Hpa);

impl KedaQueue {
    const RUNNING: f64 = 16.0;
}

impl Default for KedaQueue {
    fn default() -> Self {
        Self(Hpa::keda())
    }
}

impl ScalingPolicy for KedaQueue {
    fn interval(&self) -> f64 {
        HPA_INTERVAL
    }

    fn wanted(&mut self, view: &FleetView<'_>) -> u32 {
        let running: usize = view.replicas.iter().map(|replica| replica.running).sum();
        let queued: usize = view.replicas.iter().map(|replica| replica.queued).sum();
        let asked = ((running as f64 / Self::RUNNING).ceil() as u32).max(queued as u32);
        self.0.follow(view.now, view.wanted, asked)
    }
}

/// llm-d's policy on latencies over the service level.
pub struct LlmdSlo {
    hpa: Hpa,
    scores: Vec<f64>,
}

impl LlmdSlo {
    const WINDOW: f64 = 60.0;
    const UP: f64 = 0.55;
    const DOWN: f64 = 0.40;
    /// Three scrapes of 15 s.
    const SCORES: usize = 3;
}

impl Default for LlmdSlo {
    fn default() -> Self {
        Self { hpa: Hpa::llm_d(), scores: Vec::new() }
    }
}

impl ScalingPolicy for LlmdSlo {
    fn interval(&self) -> f64 {
        HPA_INTERVAL
    }

    fn wanted(&mut self, view: &FleetView<'_>) -> u32 {
        let since = view.now - Self::WINDOW;
        let ttfts = view.first_tokens.iter().rev().take_while(|first| first.0 > since).map(|first| first.1);
        let itls = view.finished.iter().rev().take_while(|end| end.0 > since).map(|end| end.1);
        let score = (p90(ttfts.collect()) / view.level.ttft).max(p90(itls.collect()) / view.level.itl);
        self.scores.push(score.min(2.0));
        let last = &self.scores[self.scores.len().saturating_sub(Self::SCORES)..];
        let score = last.iter().sum::<f64>() / last.len() as f64;
        let count = f64::from(view.wanted);
        let ready = view.replicas.iter().filter(|replica| replica.is_ready).count() as f64 / count;
        let ready = if ready > 0.0 && ready < 1.0 { ready } else { 1.0 };
        let asked = if score > Self::UP {
            count + (count * (score * ready / Self::UP - 1.0)).ceil().max(0.0)
        } else if score < Self::DOWN {
            count - (count * (1.0 - score / Self::DOWN)).floor()
        } else {
            count
        };
        self.hpa.follow(view.now, view.wanted, asked as u32)
    }
}

fn p90(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get((values.len() * 9 / 10).min(values.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

/// llm-d's policy on prompt tokens in flight and KV in use.
pub struct TokenAware(Hpa);

impl TokenAware {
    const KV: f64 = 0.8;
    /// Share of the TTFT that may be spent waiting: 1.5 s of 3 s in the published guide.
    const TTFT_SHARE: f64 = 0.5;
}

impl Default for TokenAware {
    fn default() -> Self {
        Self(Hpa::keda())
    }
}

impl ScalingPolicy for TokenAware {
    fn interval(&self) -> f64 {
        HPA_INTERVAL
    }

    fn wanted(&mut self, view: &FleetView<'_>) -> u32 {
        let step = &view.engine.step;
        let chunk = view.engine.batch_tokens;
        let speed = chunk / (step.decode(0.0, 0.0) + step.prefill(0.0, chunk));
        let queued: f64 = view.replicas.iter().map(|replica| replica.queued_tokens).sum();
        let kv: f64 = view.replicas.iter().map(|replica| replica.kv_tokens / view.engine.kv_tokens).sum();
        let asked =
            (queued / speed / (view.level.ttft * Self::TTFT_SHARE)).ceil().max((kv / Self::KV).ceil());
        self.0.follow(view.now, view.wanted, asked as u32)
    }
}

/// Dynamo's load loop with its thresholds, for workers that do both phases.
pub struct DynamoThreshold {
    up: f64,
    down: f64,
}

impl DynamoThreshold {
    /// `optimization_target = "throughput"`.
    pub const THROUGHPUT: Self = Self { up: 1.0, down: 0.6 };
    /// `optimization_target = "latency"`.
    pub const LATENCY: Self = Self { up: 0.4, down: 0.1 };
}

impl ScalingPolicy for DynamoThreshold {
    fn interval(&self) -> f64 {
        5.0
    }

    fn wanted(&mut self, view: &FleetView<'_>) -> u32 {
        let count = view.wanted;
        if view.replicas.iter().any(|replica| !replica.is_ready) {
            return count;
        }
        let usage = view
            .replicas
            .iter()
            .map(|replica| (replica.kv_tokens + replica.queued_tokens) / view.engine.kv_tokens);
        let most = usage.fold(0.0, f64::max);
        if most > self.up {
            count + 1
        } else if count > 1 && most < self.down && most * f64::from(count) / f64::from(count - 1) < self.up {
            count - 1
        } else {
            count
        }
    }
}

/// A policy that knows the requests to come, one start ahead.
pub struct Clairvoyant {
    /// Requests per second that one worker serves within the service level.
    pub capacity: f64,
}

impl Clairvoyant {
    const WINDOW: f64 = 60.0;
}

impl ScalingPolicy for Clairvoyant {
    fn interval(&self) -> f64 {
        5.0
    }

    /// Returns the count for the busiest minute between now and the time at which a worker requested now is ready.
    fn wanted(&mut self, view: &FleetView<'_>) -> u32 {
        let count = |at: f64| view.requests.partition_point(|request| request.at < at);
        let step = Self::WINDOW / 4.0;
        let steps = ((view.start_time + 2.0 * Self::WINDOW) / step).ceil() as u32;
        let busiest = (0..=steps).map(|number| {
            let from = (view.now - Self::WINDOW + f64::from(number) * step).max(0.0);
            count(from + Self::WINDOW) - count(from)
        });
        let rate = busiest.max().unwrap_or(0) as f64 / Self::WINDOW;
        (rate / self.capacity - 0.02).ceil() as u32
    }
}
