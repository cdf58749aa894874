//! Tests of unary requests, over a real socket.

use std::time::Duration;

use futures_util::StreamExt;
use hyper_util::client::legacy::Client as LegacyClient;
use hyper_util::rt::TokioExecutor;
use router_kserve::Config;
use router_kserve::proto::inference::InferTensorContents;
use router_kserve::proto::inference::infer_parameter::ParameterChoice::{
    BoolParam, DoubleParam, Int64Param, StringParam, Uint64Param,
};
use serde_json::json;
use tonic::{Code, Request};

use crate::support::{self, Asking, lengthed, rig, rig_with, typed_texts};

#[tokio::test]
async fn typed_in_typed_out() {
    let mut rig = rig().await;
    let response = rig.client.model_infer(Asking::of("tiny").0).await.expect("an answer").into_inner();
    assert_eq!((response.id.as_str(), response.model_name.as_str()), ("id-1", "tiny"));
    assert_eq!(response.model_version, "1");
    assert!(response.raw_output_contents.is_empty());
    assert_eq!(response.outputs.len(), 2);
    assert_eq!(
        (response.outputs[0].datatype.as_str(), response.outputs[0].shape.as_slice()),
        ("BYTES", &[1][..])
    );
    assert_eq!(typed_texts(&response, "text_output"), ["HELLO"]);
    assert_eq!(typed_texts(&response, "finish_reason"), ["stop"]);
    assert_eq!(rig.fake.last().1, json!({ "model": "tiny", "prompt": "hello", "stream": false }));
}

#[tokio::test]
async fn raw_in_raw_out() {
    let mut rig = rig().await;
    let asking =
        Asking::empty("tiny").raw_text("text_input", &[1, 1], &["grüß"]).raw("stream", "BOOL", &[1], &[0]);
    let response = rig.client.model_infer(asking.0).await.expect("an answer").into_inner();
    assert!(response.outputs.iter().all(|output| output.contents.is_none() && output.shape == [1, 1]));
    assert_eq!(response.raw_output_contents, [lengthed(&["GRÜSS"]), lengthed(&["stop"])]);
}

#[tokio::test]
async fn several_prompts_in_order() {
    let mut rig = rig().await;
    for shape in [&[3][..], &[3, 1]] {
        let asking = Asking::empty("tiny").typed_text("text_input", shape, &["a", "b", "c"]);
        let response = rig.client.model_infer(asking.0).await.expect("an answer").into_inner();
        assert_eq!(typed_texts(&response, "text_output"), ["A", "B", "C"]);
        assert_eq!(response.outputs[0].shape, shape);
        assert_eq!(rig.fake.last().1["prompt"], json!(["a", "b", "c"]));
    }
}

#[tokio::test]
async fn sampling_parameters_from_all_places() {
    let mut rig = rig().await;
    let sampling = r#"{"temperature": "0.1", "top_p": 0.5, "seed": 1, "guided_regex": "a+", "n": 1}"#;
    let asking = Asking::of("tiny")
        .typed_text("sampling_parameters", &[1], &[sampling])
        .with("top_p", DoubleParam(0.75))
        .with("stop", StringParam("[\"x\", \"y\"]".to_owned()))
        .with("min_p", StringParam("0.05".to_owned()))
        .with("ignore_eos", BoolParam(true))
        .with("min_tokens", Uint64Param(2))
        .with("custom", Int64Param(-4))
        .with("sequence_id", Int64Param(9))
        .with("priority", Uint64Param(1))
        .with("triton_future", BoolParam(true))
        .typed(
            "random_seed",
            "UINT64",
            &[1],
            InferTensorContents { uint64_contents: vec![77], ..Default::default() },
        )
        .typed(
            "temperature",
            "FP32",
            &[1],
            InferTensorContents { fp32_contents: vec![0.7], ..Default::default() },
        )
        .typed(
            "max_tokens",
            "INT32",
            &[1, 1],
            InferTensorContents { int_contents: vec![9], ..Default::default() },
        );
    rig.client.model_infer(asking.0).await.expect("an answer");
    let wanted = json!({
        "model": "tiny", "prompt": "hello", "stream": false, "temperature": 0.7, "top_p": 0.75, "seed": 77,
        "guided_regex": "a+", "stop": ["x", "y"], "min_p": 0.05, "ignore_eos": true, "min_tokens": 2, "custom": -4,
        "max_tokens": 9,
    });
    assert_eq!(rig.fake.last().1, wanted);
}

#[tokio::test]
async fn outputs_that_are_asked_for() {
    let mut rig = rig().await;
    let asking = Asking::of("tiny")
        .typed_flag("return_num_input_tokens", true)
        .typed_flag("return_num_output_tokens", true)
        .typed_flag("return_logprobs", true)
        .typed_flag("exclude_input_in_output", false);
    let response = rig.client.model_infer(asking.0).await.expect("an answer").into_inner();
    assert_eq!(typed_texts(&response, "text_output"), ["helloHELLO"]);
    assert_eq!(typed_texts(&response, "logprobs"), [r#"{"tokens":["x"]}"#]);
    assert_eq!(rig.fake.last().1["logprobs"], 1);
    let counts: Vec<u32> = response.outputs[3..]
        .iter()
        .flat_map(|output| output.contents.clone().expect("typed").uint_contents)
        .collect();
    assert_eq!(counts, [5, 3]);

    let asking = Asking::of("tiny").output("finish_reason");
    let response = rig.client.model_infer(asking.0).await.expect("an answer").into_inner();
    assert_eq!(
        response.outputs.iter().map(|output| output.name.as_str()).collect::<Vec<_>>(),
        ["finish_reason"]
    );
}

#[tokio::test]
async fn metadata_both_ways() {
    let mut rig = rig().await;
    let mut request = Request::new(Asking::of("tiny").0);
    for name in router_kserve::FORWARDED_METADATA {
        request.metadata_mut().insert(name, format!("value of {name}").parse().expect("a value"));
    }
    request.metadata_mut().insert("x-forwarded-for", "1.2.3.4".parse().expect("a value"));
    let response = rig.client.model_infer(request).await.expect("an answer");
    assert_eq!(response.metadata().get("x-request-id").expect("it is returned"), "seen-1");
    assert!(response.metadata().get("x-secret").is_none());
    let (headers, _) = rig.fake.last();
    assert_eq!(headers.len(), router_kserve::FORWARDED_METADATA.len());
    for name in router_kserve::FORWARDED_METADATA {
        assert_eq!(headers[name], format!("value of {name}"));
    }
}

#[tokio::test]
async fn refusals_become_codes() {
    let mut rig = rig().await;
    let cases = [
        (400, Code::InvalidArgument),
        (401, Code::Unauthenticated),
        (403, Code::PermissionDenied),
        (404, Code::NotFound),
        (408, Code::DeadlineExceeded),
        (413, Code::ResourceExhausted),
        (422, Code::InvalidArgument),
        (429, Code::ResourceExhausted),
        (500, Code::Internal),
        (502, Code::Internal),
        (503, Code::Unavailable),
        (504, Code::DeadlineExceeded),
    ];
    for (status, code) in cases {
        let asking = Asking::of(&format!("status-{status}"));
        let refused = rig.client.model_infer(asking.0).await.expect_err("a refusal");
        assert_eq!(refused.code(), code, "{status}");
        assert_eq!(refused.message(), format!("refused with {status}"));
        assert_eq!(refused.metadata().get("retry-after").expect("it is returned"), "7");
        assert_eq!(refused.metadata().get("x-request-id").expect("it is returned"), "seen-1");
        assert!(refused.metadata().get("x-secret").is_none());
    }
    let unreadable = rig.client.model_infer(Asking::of("text").0).await.expect_err("no JSON");
    assert_eq!(unreadable.code(), Code::Internal);
}

#[tokio::test]
async fn what_is_malformed_is_named() {
    let mut rig = rig().await;
    let ints = |value| InferTensorContents { int_contents: vec![value], ..Default::default() };
    let bytes =
        |text: &'static [u8]| InferTensorContents { bytes_contents: vec![text.into()], ..Default::default() };
    let cases = [
        ("text_input", Asking::empty("tiny")),
        ("text_input", Asking::empty("tiny").typed("text_input", "INT32", &[1], ints(1))),
        ("text_input", Asking::empty("tiny").typed_text("text_input", &[2], &["a"])),
        ("text_input", Asking::empty("tiny").typed_text("text_input", &[1, 2], &["a", "b"])),
        ("text_input", Asking::empty("tiny").typed_text("text_input", &[0], &[])),
        ("text_input", Asking::empty("tiny").typed("text_input", "BYTES", &[1], bytes(b"\xff"))),
        ("text_input", Asking::empty("tiny").raw("text_input", "BYTES", &[1], &[9, 0, 0, 0, b'a'])),
        ("text_input", Asking::of("tiny").typed_text("text_input", &[1], &["again"])),
        ("stream", Asking::of("tiny").typed_flag("stream", true)),
        ("stream", Asking::of("tiny").typed("stream", "INT32", &[1], ints(3))),
        ("temperature", Asking::of("tiny").typed_text("temperature", &[1], &["warm"])),
        ("max_tokens", Asking::of("tiny").typed("max_tokens", "FP16", &[1], ints(3))),
        ("image", Asking::of("tiny").typed_text("image", &[1], &["png"])),
        ("sampling_parameters", Asking::of("tiny").typed_text("sampling_parameters", &[1], &["[1]"])),
        ("sampling_parameters", Asking::of("tiny").typed_text("sampling_parameters", &[1], &["{"])),
        ("n", Asking::of("tiny").with("n", Int64Param(2))),
        ("model", Asking::of("tiny").with("model", StringParam("other".to_owned()))),
        ("temperature", Asking::of("tiny").with("temperature", DoubleParam(f64::NAN))),
        ("timeout", Asking::of("tiny").with("timeout", Int64Param(-1))),
        ("token_ids", Asking::of("tiny").output("token_ids")),
        ("return_cumulative_logprob", Asking::of("tiny").typed_flag("return_cumulative_logprob", true)),
    ];
    for (name, asking) in cases {
        let refused = rig.client.model_infer(asking.0).await.expect_err(name);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert!(refused.message().starts_with(&format!("`{name}`: ")), "{}", refused.message());
    }
    let unnamed = rig.client.model_infer(Asking::of("").0).await.expect_err("no model");
    assert_eq!(unnamed.code(), Code::InvalidArgument);
    let mut versioned = Asking::of("tiny").0;
    versioned.model_version = "2".to_owned();
    assert_eq!(rig.client.model_infer(versioned).await.expect_err("no version").code(), Code::NotFound);
    assert!(
        rig.fake.calls.lock().expect("no panic holds it").is_empty(),
        "nothing of this may reach the backend"
    );
}

#[tokio::test]
async fn a_deadline_drops_the_request() {
    let mut rig = rig().await;
    let mut request = Request::new(Asking::of("silent").0);
    request.metadata_mut().insert("grpc-timeout", "80m".parse().expect("a value"));
    let late = rig.clockless().model_infer(request).await.expect_err("too late");
    assert_eq!((late.code(), late.message()), (Code::DeadlineExceeded, "the deadline passed"), "{late:?}");
    rig.fake.until_inside(0).await;
    assert_eq!(rig.fake.calls.lock().expect("no panic holds it").len(), 1);

    let asking = Asking::of("silent").with("timeout", Int64Param(50_000));
    let late = rig.client.model_infer(asking.0).await.expect_err("too late");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    rig.fake.until_inside(0).await;
}

#[tokio::test]
async fn a_client_that_goes_drops_the_request() {
    let rig = rig().await;
    let mut client = rig.client.clone();
    let asking = tokio::spawn(async move { client.model_infer(Asking::of("silent").0).await });
    rig.fake.until_inside(1).await;
    asking.abort();
    rig.fake.until_inside(0).await;
}

#[tokio::test]
async fn large_messages_and_answers_are_refused() {
    let config = Config { request_bytes_max: 4096, answer_bytes_max: 512, ..Config::default() };
    let mut rig = rig_with(config).await;
    let long = "x".repeat(5000);
    let asking = Asking::empty("tiny").typed_text("text_input", &[1], &[&long]);
    let refused = rig.client.model_infer(asking.0).await.expect_err("too large");
    assert_eq!(refused.code(), Code::OutOfRange, "{refused:?}");
    let asking = Asking::empty("tiny").typed_text("text_input", &[1], &[&long[..600]]);
    let refused = rig.client.model_infer(asking.0).await.expect_err("its answer is too large");
    assert_eq!(refused.code(), Code::Internal, "{refused:?}");
}

/// Makes a call whose client sends these bytes and then neither data nor the end.
async fn half_sent(
    rig: &support::Rig,
    method: &str,
    bytes: Vec<u8>,
) -> http::Response<hyper::body::Incoming> {
    sent_raw(rig, method, None, bytes).await
}

/// Makes a call in this message encoding whose client sends these bytes and then neither data nor the end.
async fn sent_raw(
    rig: &support::Rig,
    method: &str,
    encoding: Option<&'static str>,
    bytes: Vec<u8>,
) -> http::Response<hyper::body::Incoming> {
    let client =
        LegacyClient::builder(TokioExecutor::new()).http2_only(true).build_http::<axum::body::Body>();
    let sent = futures_util::stream::once(std::future::ready(Ok::<_, std::convert::Infallible>(bytes)));
    let body = axum::body::Body::from_stream(sent.chain(futures_util::stream::pending()));
    let mut request =
        http::Request::post(format!("http://{}/inference.GRPCInferenceService/{method}", rig.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
    if let Some(encoding) = encoding {
        request = request.header("grpc-encoding", encoding);
    }
    client.request(request.body(body).expect("a request")).await.expect("an answer")
}

#[tokio::test]
async fn shared_memory_and_compression_are_refused() {
    let mut rig = rig().await;
    let region = || support::parameter(StringParam("region".to_owned()));
    let key = "shared_memory_region".to_owned();
    let mut typed = Asking::of("tiny").0;
    typed.inputs[0].parameters.insert(key.clone(), region());
    let mut raw = Asking::empty("tiny").raw_text("text_input", &[1], &["hello"]).0;
    raw.inputs[0].parameters.insert(key.clone(), region());
    let mut output = Asking::of("tiny").output("text_output").0;
    output.outputs[0].parameters.insert(key, region());
    for (request, tensor) in [(typed, "text_input"), (raw, "text_input"), (output, "text_output")] {
        let refused = rig.client.model_infer(request).await.expect_err("shared memory");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert_eq!(refused.message(), format!("`{tensor}`: shared memory is not supported"));
    }

    // The flag of a compressed message, whose coding the service does not know.
    let compressed = vec![1, 0, 0, 0, 4, 0x1f, 0x8b, 8, 0];
    let answer = sent_raw(&rig, "ModelInfer", Some("gzip"), compressed).await;
    assert_eq!(answer.headers().get("grpc-status").expect("a status"), "12", "{answer:?}");
    // Triton's calls that register a region are no part of this service.
    let answer = sent_raw(&rig, "SystemSharedMemoryRegister", None, vec![0; 5]).await;
    assert_eq!(answer.headers().get("grpc-status").expect("a status"), "12", "{answer:?}");
    assert!(rig.fake.calls.lock().expect("no panic holds it").is_empty(), "none reached an engine");
}

/// The beginning of a message that announces `announced` bytes.
fn beginning(announced: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(announced.to_be_bytes());
    bytes.resize(5 + len, b'x');
    bytes
}

#[tokio::test]
async fn a_half_sent_message_is_given_up_after_its_time() {
    let config = Config { message_within: Duration::from_millis(100), ..Config::default() };
    let mut rig = rig_with(config).await;
    // No byte, a part of the prefix, the prefix, and half of the announced message.
    for bytes in [Vec::new(), vec![0, 0], beginning(1000, 0), beginning(100_000, 50_000)] {
        let answer =
            tokio::time::timeout(Duration::from_secs(10), half_sent(&rig, "ModelInfer", bytes)).await;
        let answer = answer.expect("in time");
        assert_eq!(answer.headers().get("grpc-status").expect("a status"), "4", "{answer:?}");
    }
    rig.client.model_infer(Asking::of("tiny").0).await.expect("others are served");
}

#[tokio::test]
async fn a_length_beyond_the_limit_is_refused_when_it_is_announced() {
    let rig = rig().await;
    for (method, announced) in
        [("ModelInfer", u32::MAX), ("ModelInfer", (16 << 20) + 1), ("ModelReady", (64 << 10) + 1)]
    {
        let answer = half_sent(&rig, method, beginning(announced, 0)).await;
        assert_eq!(answer.headers().get("grpc-status").expect("a status"), "11", "{method}: {answer:?}");
    }
}

#[tokio::test]
async fn the_bytes_of_all_calls_share_one_budget() {
    let config = Config { request_bytes_max: 200 << 10, received_bytes_max: 300 << 10, ..Config::default() };
    let mut rig = rig_with(config).await;
    let long = "x".repeat(180 << 10);
    let asking = |model: &str| Asking::empty(model).typed_text("text_input", &[1], &[&long]).0;
    // A request that waits for its answer keeps its charge.
    let mut first = rig.client.clone();
    let request = asking("silent");
    let waiting = tokio::spawn(async move { first.model_infer(request).await });
    rig.fake.until_inside(1).await;
    let refused = rig.client.model_infer(asking("tiny")).await.expect_err("no room");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    rig.client.model_infer(Asking::of("tiny").0).await.expect("there is room for a small one");
    waiting.abort();
    rig.fake.until_inside(0).await;
    rig.client.model_infer(asking("tiny")).await.expect("there is room again");
}

#[tokio::test]
async fn a_shutdown_lets_calls_end() {
    let mut rig = rig().await;
    let mut client = rig.client.clone();
    let asking = tokio::spawn(async move { client.model_infer(Asking::of("gated").0).await });
    rig.fake.until_inside(1).await;
    rig.shutdown.take().expect("not shut down yet").send(()).expect("it listens");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!rig.serving.is_finished());
    rig.fake.gate.notify_one();
    let response = asking.await.expect("no panic").expect("an answer").into_inner();
    assert_eq!(typed_texts(&response, "text_output"), ["HELLO"]);
    tokio::time::timeout(Duration::from_secs(5), rig.serving).await.expect("it ends").expect("no panic");
}
