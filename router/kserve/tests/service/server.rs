//! Tests of the metadata of the server and its models, over a real socket.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use router_kserve::proto::health::HealthCheckRequest;
use router_kserve::proto::health::health_check_response::ServingStatus;
use router_kserve::proto::health::health_client::HealthClient;
use router_kserve::proto::inference::{
    ModelConfigRequest, ModelMetadataRequest, ModelReadyRequest, RepositoryIndexRequest, ServerLiveRequest,
    ServerMetadataRequest, ServerReadyRequest,
};
use tonic::{Code, Request};

use crate::support::{self, rig};

fn ready(name: &str, version: &str) -> ModelReadyRequest {
    ModelReadyRequest { name: name.to_owned(), version: version.to_owned() }
}

#[tokio::test]
async fn readiness() {
    let mut rig = rig().await;
    assert!(rig.client.server_live(ServerLiveRequest {}).await.expect("an answer").into_inner().live);
    for is_ready in [true, false] {
        rig.fake.is_ready.store(is_ready, Ordering::SeqCst);
        let server = rig.client.server_ready(ServerReadyRequest {}).await.expect("an answer").into_inner();
        assert_eq!(server.ready, is_ready);
        let cases = [("tiny", "", true), ("tiny", "1", true), ("tiny", "2", false), ("none", "", false)];
        for (name, version, is_known) in cases {
            let model = rig.client.model_ready(ready(name, version)).await.expect("an answer").into_inner();
            assert_eq!(model.ready, is_ready && is_known, "{name} {version}");
        }
    }
    let mut denied = Request::new(ready("tiny", ""));
    denied.metadata_mut().insert("authorization", "Bearer bad".parse().expect("a value"));
    assert_eq!(rig.client.model_ready(denied).await.expect_err("no access").code(), Code::Unauthenticated);
}

#[tokio::test]
async fn metadata_and_configuration() {
    let mut rig = rig().await;
    let server = rig.client.server_metadata(ServerMetadataRequest {}).await.expect("an answer").into_inner();
    assert_eq!(server.name, "kvasir");

    let asked = ModelMetadataRequest { name: "tiny".to_owned(), version: String::new() };
    let model = rig.client.model_metadata(asked).await.expect("an answer").into_inner();
    assert_eq!((model.name.as_str(), model.versions.as_slice()), ("tiny", &["1".to_owned()][..]));
    assert_eq!((model.inputs[0].name.as_str(), model.inputs[0].datatype.as_str()), ("text_input", "BYTES"));
    assert_eq!(model.outputs[0].name, "text_output");

    let asked = ModelConfigRequest { name: "tiny".to_owned(), version: "1".to_owned() };
    let config = rig.client.model_config(asked).await.expect("an answer").into_inner().config.expect("it");
    assert!(config.model_transaction_policy.expect("a policy").decoupled);
    assert!(!config.input[0].optional && config.input[1].optional);

    let asked = ModelMetadataRequest { name: "none".to_owned(), version: String::new() };
    assert_eq!(rig.client.model_metadata(asked).await.expect_err("no model").code(), Code::NotFound);

    let index = rig.client.repository_index(RepositoryIndexRequest::default()).await.expect("an answer");
    let names: Vec<_> =
        index.into_inner().models.into_iter().map(|model| (model.name, model.state)).collect();
    assert_eq!(names, [("tiny".to_owned(), "READY".to_owned()), ("other".to_owned(), "READY".to_owned())]);
}

#[tokio::test]
async fn every_listed_input_is_taken() {
    let mut rig = rig().await;
    let asked = ModelMetadataRequest { name: "tiny".to_owned(), version: String::new() };
    let model = rig.client.model_metadata(asked).await.expect("an answer").into_inner();
    for input in model.inputs.iter().filter(|input| input.name != "text_input" && input.name != "stream") {
        let asking = support::Asking::empty("tiny").raw_text("text_input", &[1], &["hello"]);
        let zero = match input.datatype.as_str() {
            "BYTES" => support::lengthed(&["{}"]),
            "BOOL" => vec![1],
            "UINT64" => vec![0; 8],
            _ => vec![0; 4],
        };
        let asking = asking.raw(&input.name, &input.datatype, &[1], &zero);
        rig.client.model_infer(asking.0).await.expect(&input.name);
    }
    for output in &model.outputs {
        let asking = support::Asking::of("tiny").output(&output.name);
        let response = rig.client.model_infer(asking.0).await.expect(&output.name).into_inner();
        assert_eq!(response.outputs[0].datatype, output.datatype, "{}", output.name);
    }
}

#[tokio::test]
async fn health() {
    let rig = rig().await;
    let mut client = HealthClient::new(rig.channel.clone());
    let asked = |service: &str| HealthCheckRequest { service: service.to_owned() };
    for service in ["", "inference.GRPCInferenceService"] {
        let checked = client.check(asked(service)).await.expect("an answer").into_inner();
        assert_eq!(checked.status(), ServingStatus::Serving);
    }
    assert_eq!(client.check(asked("none")).await.expect_err("no service").code(), Code::NotFound);

    let mut watched = client.watch(asked("")).await.expect("a stream").into_inner();
    let first = watched.next().await.expect("not over").expect("a status");
    assert_eq!(first.status(), ServingStatus::Serving);
    rig.fake.is_ready.store(false, Ordering::SeqCst);
    let changed = tokio::time::timeout(Duration::from_secs(5), watched.next()).await.expect("a change");
    assert_eq!(changed.expect("not over").expect("a status").status(), ServingStatus::NotServing);
    let mut unknown = client.watch(asked("none")).await.expect("a stream").into_inner();
    let status = unknown.next().await.expect("not over").expect("a status").status();
    assert_eq!(status, ServingStatus::ServiceUnknown);
}

#[tokio::test]
async fn what_is_left_out_is_unimplemented() {
    let rig = rig().await;
    let mut client = tonic::client::Grpc::new(rig.channel.clone());
    client.ready().await.expect("a connection");
    let path = http::uri::PathAndQuery::from_static("/inference.GRPCInferenceService/ModelStatistics");
    let codec = tonic_prost::ProstCodec::<ServerLiveRequest, ServerLiveRequest>::default();
    let refused =
        client.unary(Request::new(ServerLiveRequest {}), path, codec).await.expect_err("no such method");
    assert_eq!(refused.code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_stop_lets_watchers_and_silent_connections_go() {
    let mut rig = rig().await;
    let mut client = HealthClient::new(rig.channel.clone());
    let mut watched =
        client.watch(HealthCheckRequest { service: String::new() }).await.expect("a stream").into_inner();
    let first = watched.next().await.expect("not over").expect("a status");
    assert_eq!(first.status(), ServingStatus::Serving);
    // A client that connects and sends nothing.
    let silent = tokio::net::TcpStream::connect(rig.address).await.expect("a connection");
    tokio::time::sleep(Duration::from_millis(50)).await;
    rig.shutdown.take().expect("it runs").send(()).expect("it listens");
    let last = watched.next().await.expect("not over").expect("a status");
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert!(watched.next().await.is_none());
    tokio::time::timeout(Duration::from_secs(5), &mut rig.serving).await.expect("it ends").expect("well");
    drop(silent);
}

#[tokio::test]
async fn a_strangers_message_is_not_read() {
    let mut rig = rig().await;
    let mut asked = Request::new(support::Asking::of("tiny").0);
    asked.metadata_mut().insert("authorization", "Bearer stranger".parse().expect("a value"));
    let refused = rig.client.model_infer(asked).await.expect_err("refused");
    assert_eq!((refused.code(), refused.message()), (Code::Unauthenticated, "nobody knows this key"));
    let mut asked = Request::new(ServerReadyRequest {});
    asked.metadata_mut().insert("authorization", "Bearer stranger".parse().expect("a value"));
    assert!(rig.client.server_ready(asked).await.is_ok(), "everybody may ask whether it is ready");
}
