//! A backend whose behaviour depends on the model's name, and a client of a service in front of it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::{HeaderMap, Response, StatusCode};
use hyper_util::client::legacy::Client as LegacyClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use router_kserve::proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use router_kserve::proto::inference::infer_parameter::ParameterChoice;
use router_kserve::proto::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use router_kserve::proto::inference::{
    InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse,
};
use router_kserve::{Answer, Backend, Call, Config, serve};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tonic::transport::{Channel, Endpoint};

/// A fake backend: its state, and the calls that it received.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) is_ready: AtomicBool,
    pub(crate) calls: Mutex<Vec<(HeaderMap, Value)>>,
    /// Requests that have begun and were neither answered nor dropped.
    pub(crate) inside: AtomicUsize,
    pub(crate) inside_most: AtomicUsize,
    /// Releases one answer of the model `gated`.
    pub(crate) gate: Notify,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            is_ready: AtomicBool::new(true),
            calls: Mutex::default(),
            inside: AtomicUsize::new(0),
            inside_most: AtomicUsize::new(0),
            gate: Notify::new(),
        }
    }
}

/// Counts one request in progress.
struct Inside(Arc<Fake>);

/// Handle by which the service owns the fake.
pub(crate) struct FakeHandle(pub(crate) Arc<Fake>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Fake {
    pub(crate) fn last(&self) -> (HeaderMap, Value) {
        self.calls.lock().expect("no panic holds it").last().expect("a call").clone()
    }

    pub(crate) fn inside(&self) -> usize {
        self.inside.load(Ordering::SeqCst)
    }

    /// Waits until `count` requests are in progress.
    pub(crate) async fn until_inside(&self, count: usize) {
        for _ in 0..500 {
            if self.inside() == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} requests are inside, not {count}", self.inside());
    }
}

fn answer(status: StatusCode, kind: &str, body: Body) -> Answer {
    let response = Response::builder().status(status).header("content-type", kind);
    response.header("x-request-id", "seen-1").header("x-secret", "no").body(body).expect("valid headers")
}

fn refusal(status: u16) -> Answer {
    let body = json!({ "error": { "message": format!("refused with {status}"), "code": status } });
    let status = StatusCode::from_u16(status).expect("a status");
    let mut answer = answer(status, "application/json", Body::from(body.to_string()));
    answer.headers_mut().insert("retry-after", "7".parse().expect("a value"));
    answer
}

fn chunk(text: &str, finish_reason: Option<&str>) -> String {
    let choice = json!({ "index": 0, "text": text, "finish_reason": finish_reason, "logprobs": null });
    format!("data: {}\n\n", json!({ "id": "cmpl-1", "choices": [choice] }))
}

/// Upper case of each prompt, in the reverse order of choices.
fn whole(body: &Value) -> Value {
    let prompts = match &body["prompt"] {
        Value::Array(list) => list.clone(),
        one => vec![one.clone()],
    };
    let choices: Vec<Value> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| {
            let text = prompt.as_str().expect("a text").to_uppercase();
            json!({ "index": index, "text": text, "finish_reason": "stop", "logprobs": { "tokens": ["x"] } })
        })
        .rev()
        .collect();
    json!({ "choices": choices, "usage": { "prompt_tokens": 5, "completion_tokens": 3 } })
}

impl Backend for FakeHandle {
    fn admits(&self, headers: &HeaderMap) -> Result<(), (http::StatusCode, String)> {
        match headers.get("authorization").is_some_and(|key| key == "Bearer stranger") {
            true => Err((http::StatusCode::UNAUTHORIZED, "nobody knows this key".to_owned())),
            false => Ok(()),
        }
    }

    fn is_live(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.0.is_ready.load(Ordering::SeqCst)
    }

    async fn models(&self, headers: HeaderMap) -> Answer {
        if headers.get("authorization").is_some_and(|value| value == "Bearer bad") {
            return refusal(401);
        }
        let list = json!({ "object": "list", "data": [{ "id": "tiny" }, { "id": "other" }] });
        answer(StatusCode::OK, "application/json", Body::from(list.to_string()))
    }

    async fn completions(&self, call: Call) -> Answer {
        let body: Value = serde_json::from_slice(&call.body).expect("a JSON body");
        self.0.calls.lock().expect("no panic holds it").push((call.headers, body.clone()));
        let now = self.0.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.inside_most.fetch_max(now, Ordering::SeqCst);
        let guard = Inside(Arc::clone(&self.0));
        let model = body["model"].as_str().expect("a model").to_owned();
        let is_streamed = body["stream"] == json!(true);

        if let Some(status) = model.strip_prefix("status-") {
            return refusal(status.parse().expect("a number"));
        }
        let events: Vec<String> = match model.as_str() {
            "silent" => std::future::pending().await,
            "gated" => {
                self.0.gate.notified().await;
                vec![chunk("through", Some("stop")), "data: [DONE]\n\n".to_owned()]
            }
            "text" => return answer(StatusCode::OK, "application/json", Body::from("no JSON")),
            "short" => vec![chunk("a", None)],
            "failing" => {
                let error = json!({ "error": { "message": "the engine fell over", "code": 500 } });
                vec![chunk("a", None), format!("data: {error}\n\n")]
            }
            "endless" => vec![chunk("a", None)],
            _ if !is_streamed => {
                return answer(StatusCode::OK, "application/json", Body::from(whole(&body).to_string()));
            }
            _ => {
                let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n".to_owned();
                let done = "data: [DONE]\n\n".to_owned();
                vec![chunk("one ", None), chunk("two ", None), chunk("three", Some("length")), usage, done]
            }
        };
        if model == "gated" && !is_streamed {
            return answer(StatusCode::OK, "application/json", Body::from(whole(&body).to_string()));
        }
        let events = stream::iter(events.into_iter().map(|event| Ok::<_, Infallible>(Bytes::from(event))));
        let rest: stream::BoxStream<'static, Result<Bytes, Infallible>> =
            if model == "endless" { stream::pending().boxed() } else { stream::empty().boxed() };
        let guarded = events.chain(rest).map(move |event| {
            let _ = &guard;
            event
        });
        answer(StatusCode::OK, "text/event-stream; charset=utf-8", Body::from_stream(guarded))
    }
}

/// A service on a loopback port.
pub(crate) struct Rig {
    pub(crate) fake: Arc<Fake>,
    pub(crate) address: SocketAddr,
    pub(crate) channel: Channel,
    pub(crate) client: GrpcInferenceServiceClient<Channel>,
    pub(crate) shutdown: Option<oneshot::Sender<()>>,
    pub(crate) serving: tokio::task::JoinHandle<()>,
}

pub(crate) async fn rig() -> Rig {
    rig_with(Config::default()).await
}

pub(crate) async fn rig_with(config: Config) -> Rig {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let fake = Arc::new(Fake::default());
    let (shutdown, ended) = oneshot::channel();
    let handle = Arc::new(FakeHandle(Arc::clone(&fake)));
    let serving = tokio::spawn(serve(listener, handle, config, async {
        let _ = ended.await;
    }));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URI");
    let channel = endpoint.connect().await.expect("a connection");
    let client = GrpcInferenceServiceClient::new(channel.clone());
    Rig { fake, address, channel, client, shutdown: Some(shutdown), serving }
}

impl Rig {
    /// Returns a client without timers: tonic's channel itself ends a call with a `grpc-timeout`.
    pub(crate) fn clockless(
        &self,
    ) -> GrpcInferenceServiceClient<LegacyClient<HttpConnector, tonic::body::Body>> {
        let client = LegacyClient::builder(TokioExecutor::new()).http2_only(true).build_http();
        let origin = format!("http://{}", self.address).parse().expect("a URI");
        GrpcInferenceServiceClient::with_origin(client, origin)
    }
}

pub(crate) fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

fn tensor(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

/// Builds requests.
pub(crate) struct Asking(pub(crate) ModelInferRequest);

impl Asking {
    /// Creates a typed request with the prompt `hello`.
    pub(crate) fn of(model: &str) -> Self {
        Self::empty(model).typed_text("text_input", &[1], &["hello"])
    }

    pub(crate) fn empty(model: &str) -> Self {
        Self(ModelInferRequest { model_name: model.to_owned(), id: "id-1".to_owned(), ..Default::default() })
    }

    pub(crate) fn id(mut self, id: &str) -> Self {
        self.0.id = id.to_owned();
        self
    }

    pub(crate) fn typed(
        mut self,
        name: &str,
        datatype: &str,
        shape: &[i64],
        contents: InferTensorContents,
    ) -> Self {
        self.0.inputs.push(InferInputTensor { contents: Some(contents), ..tensor(name, datatype, shape) });
        self
    }

    pub(crate) fn typed_text(self, name: &str, shape: &[i64], texts: &[&str]) -> Self {
        let bytes_contents = texts.iter().map(|text| Bytes::copy_from_slice(text.as_bytes())).collect();
        self.typed(name, "BYTES", shape, InferTensorContents { bytes_contents, ..Default::default() })
    }

    pub(crate) fn typed_flag(self, name: &str, flag: bool) -> Self {
        let contents = InferTensorContents { bool_contents: vec![flag], ..Default::default() };
        self.typed(name, "BOOL", &[1], contents)
    }

    pub(crate) fn raw(mut self, name: &str, datatype: &str, shape: &[i64], bytes: &[u8]) -> Self {
        self.0.inputs.push(tensor(name, datatype, shape));
        self.0.raw_input_contents.push(Bytes::copy_from_slice(bytes));
        self
    }

    pub(crate) fn raw_text(self, name: &str, shape: &[i64], texts: &[&str]) -> Self {
        self.raw(name, "BYTES", shape, &lengthed(texts))
    }

    pub(crate) fn with(mut self, name: &str, choice: ParameterChoice) -> Self {
        self.0.parameters.insert(name.to_owned(), parameter(choice));
        self
    }

    pub(crate) fn output(mut self, name: &str) -> Self {
        self.0.outputs.push(InferRequestedOutputTensor { name: name.to_owned(), ..Default::default() });
        self
    }
}

/// Raw elements of type BYTES.
pub(crate) fn lengthed(texts: &[&str]) -> Vec<u8> {
    let mut raw = Vec::new();
    for text in texts {
        raw.extend_from_slice(&u32::try_from(text.len()).expect("a short text").to_le_bytes());
        raw.extend_from_slice(text.as_bytes());
    }
    raw
}

/// The texts of a typed output.
pub(crate) fn typed_texts(response: &ModelInferResponse, name: &str) -> Vec<String> {
    let output = response.outputs.iter().find(|output| output.name == name);
    let output = output.unwrap_or_else(|| panic!("no output {name} in {response:?}"));
    let contents = output.contents.as_ref().expect("typed contents");
    contents.bytes_contents.iter().map(|text| String::from_utf8(text.to_vec()).expect("text")).collect()
}

/// Whether a response of a stream is marked as its request's last.
pub(crate) fn is_final(response: &ModelInferResponse) -> bool {
    match response.parameters.get("triton_final_response").and_then(|value| value.parameter_choice.as_ref()) {
        Some(ParameterChoice::BoolParam(flag)) => *flag,
        other => panic!("no mark but {other:?} in {response:?}"),
    }
}
