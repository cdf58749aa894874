//! The bidirectional stream, over a real socket.

use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use router_kserve::Config;
use router_kserve::proto::inference::infer_parameter::ParameterChoice::BoolParam;
use router_kserve::proto::inference::{ModelInferRequest, ModelStreamInferResponse};
use tonic::{Code, Request};

use crate::support::{Asking, Rig, is_final, lengthed, rig, rig_with, typed_texts};

fn streamed(model: &str) -> Asking {
    Asking::of(model).typed_flag("stream", true)
}

async fn all(rig: &mut Rig, requests: Vec<ModelInferRequest>) -> Vec<ModelStreamInferResponse> {
    let call = rig.client.model_stream_infer(stream::iter(requests)).await.expect("a stream");
    let collected = call.into_inner().map(|response| response.expect("a response")).collect();
    tokio::time::timeout(Duration::from_secs(10), collected).await.expect("it ends")
}

/// Text (empty without outputs), finish reason, mark.
fn shown(responses: &[ModelStreamInferResponse]) -> Vec<(String, String, bool)> {
    let shown = responses.iter().map(|response| {
        assert_eq!(response.error_message, "");
        let response = response.infer_response.as_ref().expect("a response");
        let first = |name| match response.outputs.is_empty() {
            true => "-".to_owned(),
            false => typed_texts(response, name).remove(0),
        };
        (first("text_output"), first("finish_reason"), is_final(response))
    });
    shown.collect()
}

fn row(text: &str, finish_reason: &str, is_final: bool) -> (String, String, bool) {
    (text.to_owned(), finish_reason.to_owned(), is_final)
}

#[tokio::test]
async fn one_response_a_chunk() {
    let mut rig = rig().await;
    let responses = all(&mut rig, vec![streamed("tiny").0]).await;
    let wanted = [row("one ", "", false), row("two ", "", false), row("three", "length", true)];
    assert_eq!(shown(&responses), wanted);
    assert!(responses.iter().all(|response| response.infer_response.as_ref().expect("it").id == "id-1"));
    assert_eq!(rig.fake.last().1["stream"], true);

    let marked = streamed("tiny").with("triton_enable_empty_final_response", BoolParam(true));
    let wanted =
        [row("one ", "", false), row("two ", "", false), row("three", "length", false), row("-", "-", true)];
    assert_eq!(shown(&all(&mut rig, vec![marked.0]).await), wanted);
}

#[tokio::test]
async fn raw_pieces() {
    let mut rig = rig().await;
    let asking =
        Asking::empty("tiny").raw_text("text_input", &[1], &["hello"]).raw("streaming", "BOOL", &[1], &[1]);
    let responses = all(&mut rig, vec![asking.output("text_output").0]).await;
    let raw: Vec<_> = responses
        .iter()
        .map(|response| response.infer_response.as_ref().expect("it").raw_output_contents[0].clone())
        .collect();
    assert_eq!(raw, [lengthed(&["one "]), lengthed(&["two "]), lengthed(&["three"])]);
}

#[tokio::test]
async fn a_whole_answer_in_a_stream() {
    let mut rig = rig().await;
    assert_eq!(shown(&all(&mut rig, vec![Asking::of("tiny").0]).await), [row("HELLO", "stop", true)]);
    let marked = Asking::of("tiny").with("triton_enable_empty_final_response", BoolParam(true));
    assert_eq!(
        shown(&all(&mut rig, vec![marked.0]).await),
        [row("HELLO", "stop", false), row("-", "-", true)]
    );
}

#[tokio::test]
async fn errors_end_their_request_only() {
    let mut rig = rig().await;
    let two = Asking::empty("tiny").typed_text("text_input", &[2], &["a", "b"]).typed_flag("stream", true);
    let counted = streamed("tiny").typed_flag("return_num_output_tokens", true);
    let prefixed = streamed("tiny").typed_flag("exclude_input_in_output", false);
    let cases = [
        (streamed("status-429"), 0, "refused with 429"),
        (streamed("short"), 1, "the answer cannot be used: it broke off before its end"),
        (streamed("failing"), 1, "the answer cannot be used: the engine fell over"),
        (two, 0, "`text_input`: 2 prompts cannot be answered as a stream; send one a request"),
        (counted, 0, "`num_output_tokens`: is only known for one prompt whose answer is not streamed"),
        (prefixed, 0, "`exclude_input_in_output`: cannot be false in a stream"),
    ];
    let count = cases.len();
    let (mut requests, mut wanted) = (Vec::new(), Vec::new());
    for (index, (asking, pieces, message)) in cases.into_iter().enumerate() {
        let id = format!("r{index}");
        requests.push(asking.id(&id).0);
        wanted.push((id, pieces, message));
    }
    requests.push(streamed("tiny").id("good").0);
    let responses = all(&mut rig, requests).await;
    let of = |id: &str| -> Vec<&ModelStreamInferResponse> {
        responses.iter().filter(|response| response.infer_response.as_ref().expect("it").id == id).collect()
    };
    for (id, pieces, message) in wanted {
        let seen = of(&id);
        assert_eq!(seen.len(), pieces + 1, "{message}");
        let last = seen[pieces];
        assert_eq!(last.error_message, message);
        assert!(is_final(last.infer_response.as_ref().expect("it")));
    }
    assert_eq!(of("good").len(), 3);
    assert_eq!(count, 6);
}

#[tokio::test]
async fn pipelining_is_bounded() {
    let mut rig = rig_with(Config { pipelined_max: 4, ..Config::default() }).await;
    let requests: Vec<_> = (0..12).map(|index| streamed("gated").id(&format!("{index}")).0).collect();
    let call = rig.client.model_stream_infer(stream::iter(requests)).await.expect("a stream");
    let mut responses = call.into_inner();
    let fake = rig.fake.clone();
    // The stream must be read for the server to continue, as with any flow control.
    let reading = tokio::spawn(async move {
        let mut ids = Vec::new();
        while let Some(response) = responses.next().await {
            ids.push(response.expect("a response").infer_response.expect("it").id);
        }
        ids
    });
    fake.until_inside(4).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(fake.calls.lock().expect("no panic holds it").len(), 4, "the fifth waits");
    for _ in 0..12 {
        fake.gate.notify_one();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut ids =
        tokio::time::timeout(Duration::from_secs(5), reading).await.expect("it ends").expect("no panic");
    ids.sort_by_key(|id| id.parse::<u32>().expect("a number"));
    assert_eq!(ids, (0..12).map(|index| index.to_string()).collect::<Vec<_>>());
    assert_eq!(fake.inside_most.load(std::sync::atomic::Ordering::SeqCst), 4);
}

#[tokio::test]
async fn requests_without_an_id_are_answered_one_after_another() {
    let mut rig = rig().await;
    let requests = vec![
        streamed("tiny").id("named").0,
        streamed("tiny").id("").0,
        Asking::of("tiny").id("").0,
        streamed("tiny").id("last").0,
    ];
    let texts: Vec<String> =
        shown(&all(&mut rig, requests).await).into_iter().map(|(text, _, _)| text).collect();
    let wanted = ["one ", "two ", "three", "one ", "two ", "three", "HELLO", "one ", "two ", "three"];
    assert_eq!(texts, wanted);
    assert_eq!(rig.fake.inside_most.load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_client_that_goes_drops_all_requests() {
    let mut rig = rig().await;
    let requests = ["endless", "silent", "endless"].iter().enumerate();
    let requests: Vec<_> = requests.map(|(index, model)| streamed(model).id(&format!("{index}")).0).collect();
    // A client of tonic keeps the call while its own side is open, so that side ends here; the call
    // continues.
    let requests = stream::iter(requests);
    let mut responses = rig.client.model_stream_infer(requests).await.expect("a stream").into_inner();
    for _ in 0..2 {
        responses.next().await.expect("not over").expect("a first piece");
    }
    rig.fake.until_inside(3).await;
    drop(responses);
    rig.fake.until_inside(0).await;
}

#[tokio::test]
async fn a_deadline_ends_the_stream() {
    let mut rig = rig().await;
    let mut request = Request::new(stream::iter(vec![streamed("endless").0]));
    request.metadata_mut().insert("grpc-timeout", "150m".parse().expect("a value"));
    let mut responses = rig.client.model_stream_infer(request).await.expect("a stream").into_inner();
    responses.next().await.expect("not over").expect("a first piece");
    let late = responses.next().await.expect("not over").expect_err("too late");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    rig.fake.until_inside(0).await;
}

#[tokio::test]
async fn a_requests_own_timeout_ends_it_alone() {
    let mut rig = rig().await;
    let slow = streamed("endless").id("slow").with(
        "timeout",
        router_kserve::proto::inference::infer_parameter::ParameterChoice::Int64Param(80_000),
    );
    let responses = all(&mut rig, vec![slow.0, streamed("tiny").id("quick").0]).await;
    let last = responses.last().expect("responses");
    assert_eq!(last.error_message, "the deadline passed");
    assert_eq!(last.infer_response.as_ref().expect("it").id, "slow");
    assert_eq!(responses.len(), 1 + 3 + 1);
    rig.fake.until_inside(0).await;
}
