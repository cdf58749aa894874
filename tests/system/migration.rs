//! `kill -9` of a decode worker in the middle of streams: they continue on other workers, without a gap or a
//! repetition.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use crate::support::{Cluster, Streamed, open, post, prompt, read_stream, request, wait_for};
use serde_json::json;

const STREAMS: usize = 8;
const TOKENS: usize = 200;

#[test]
fn eight_streams_survive_the_death_of_their_worker() {
    let mut cluster = Cluster::start("migration", &["decode", "decode", "prefill"], "");
    // Greedy, plain sampling, and penalties: state that depends on the previous tokens must be carried over.
    let body = |stream: usize| {
        let mut body = request(&prompt(stream as u64, 40 + stream * 60), TOKENS);
        body["stream"] = json!(true);
        body["ignore_eos"] = json!(true);
        body["logprobs"] = json!(null);
        match stream % 3 {
            0 => body["temperature"] = json!(0),
            1 => body["top_p"] = json!(0.9),
            _ => {
                body["frequency_penalty"] = json!(0.5);
                body["repetition_penalty"] = json!(1.2);
            }
        }
        body
    };
    let alone = |body: &serde_json::Value| {
        read_stream(open(&cluster.gateway.address, "/v1/completions", body).expect("open"), |_| {})
    };
    let mut bodies: Vec<serde_json::Value> = (0..STREAMS).map(body).collect();
    // The last stream also has a stop string, three characters of its own output, late enough to follow the
    // kill.
    let text = alone(&bodies[STREAMS - 1]).text;
    let late = (120..190).map(|at| &text[at..at + 3]).find(|stop| text.find(stop).is_some_and(|at| at > 100));
    bodies[STREAMS - 1]["stop"] = json!([late.expect("a stop string that comes late")]);
    let undisturbed: Vec<Streamed> = bodies.iter().map(alone).collect();
    assert_eq!(undisturbed[STREAMS - 1].finish.as_deref(), Some("stop"));
    let barrier = Arc::new(Barrier::new(STREAMS + 1));
    let moving = Arc::new(AtomicUsize::new(0));
    let streams: Vec<_> = (0..STREAMS)
        .map(|stream| {
            let (address, body) = (cluster.gateway.address.clone(), bodies[stream].clone());
            let (barrier, moving) = (Arc::clone(&barrier), Arc::clone(&moving));
            std::thread::spawn(move || {
                barrier.wait();
                let socket = open(&address, "/v1/completions", &body).expect("open");
                read_stream(socket, |tokens| {
                    if tokens == 10 {
                        moving.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
        })
        .collect();
    barrier.wait();
    wait_for("every stream to flow", || moving.load(Ordering::SeqCst) == STREAMS);
    let busy = |worker: usize| cluster.workers[worker].metric("kvasir_engine_requests_running");
    let victim = if busy(0) >= busy(1) { 0 } else { 1 };
    let had = busy(victim);
    cluster.workers[victim].kill();
    for (stream, thread) in streams.into_iter().enumerate() {
        let disturbed = thread.join().expect("reader");
        assert_eq!(disturbed.error, None, "stream {stream}");
        assert!(disturbed.is_done, "stream {stream} has no [DONE]");
        if stream + 1 < STREAMS {
            assert_eq!(disturbed.tokens.len(), TOKENS, "stream {stream}");
        }
        assert_eq!(disturbed, undisturbed[stream], "stream {stream} differs from its undisturbed run");
    }
    let moved = cluster.gateway.metric("kvasir_gateway_migrations_total");
    println!(
        "killed a worker with {had} running requests; {moved} went on elsewhere; 8 complete, correct streams"
    );
    assert!(moved >= 1.0, "nothing was moved: the worker died too late");

    // The worker comes back and serves again.
    cluster.workers[victim].restart();
    cluster.wait_ready(3);
    let (status, _) =
        post(&cluster.gateway.address, "/v1/completions", &request(&[65, 66], 3)).expect("an answer");
    assert_eq!(status, 200);
}

/// With a single decode worker, requests wait for its restart.
#[test]
fn a_lone_worker_is_waited_for() {
    let mut cluster = Cluster::start("lone", &["both"], "");
    let mut body = request(&prompt(1, 100), 150);
    body["stream"] = json!(true);
    body["ignore_eos"] = json!(true);
    let first = read_stream(open(&cluster.gateway.address, "/v1/completions", &body).expect("open"), |_| {});
    let address = cluster.gateway.address.clone();
    let flowing = Arc::new(AtomicUsize::new(0));
    let (count, again) = (Arc::clone(&flowing), body.clone());
    let reader = std::thread::spawn(move || {
        read_stream(open(&address, "/v1/completions", &again).expect("open"), |tokens| {
            count.store(tokens, Ordering::SeqCst)
        })
    });
    wait_for("tokens", || flowing.load(Ordering::SeqCst) >= 5);
    cluster.workers[0].kill();
    cluster.workers[0].restart();
    assert_eq!(reader.join().expect("reader"), first);
}
