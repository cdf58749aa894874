//! Certificates of clients.

use aws_lc_rs::digest::{SHA256, digest};
use rcgen::KeyPair;
use router_tls::{ClientCertificate, ClientTls, HandshakeLimits, ServerTls, ServerTlsConfig};

use crate::support::{Authority, Link, TlsFixture, ask, refusal, serve, until};

const SPIFFE: &str = "spiffe://example/ns/inference/sa/worker";

fn asking(fixture: &TlsFixture, client_certificate: ClientCertificate) -> ServerTlsConfig {
    let client_ca_file = Some(fixture.folder.path("ca.pem"));
    ServerTlsConfig { client_ca_file, client_certificate, ..fixture.server.clone() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_required_certificate_lets_in_its_owner_and_nobody_else() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&asking(&fixture, ClientCertificate::Required), HandshakeLimits::default()).await;
    let error = refusal(&ClientTls::load(&fixture.client).expect("loaded"), addr).await;
    assert!(error.contains("CertificateRequired"), "{error}");
    let (stranger, _) = fixture.client_with(&Authority::new(), "worker", &["worker.example"]);
    let error = refusal(&ClientTls::load(&stranger).expect("loaded"), addr).await;
    assert!(error.contains("UnknownCA"), "{error}");
    until("both are counted", || (tls.counts().completed, tls.counts().failed) == (0, 2)).await;

    let (owner, pair) =
        fixture.client_with(&fixture.authority, "worker 7", &["a.example", "b.example", SPIFFE]);
    let fingerprint = digest(&SHA256, &pair.der);
    let hex: String = fingerprint.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = format!("worker 7|a.example,b.example|{SPIFFE}|{hex}");
    assert_eq!(ask(&owner, addr).await, Ok(expected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_optional_certificate_may_be_missing_but_not_bad() {
    let fixture = TlsFixture::new();
    let (_tls, addr) =
        serve(&asking(&fixture, ClientCertificate::Optional), HandshakeLimits::default()).await;
    assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"));
    let (stranger, _) = fixture.client_with(&Authority::new(), "worker", &[]);
    let error = refusal(&ClientTls::load(&stranger).expect("loaded"), addr).await;
    assert!(error.contains("UnknownCA"), "{error}");
    let (owner, _) = fixture.client_with(&fixture.authority, "worker", &[SPIFFE]);
    let answer = ask(&owner, addr).await.expect("let in");
    assert!(answer.starts_with(&format!("worker||{SPIFFE}|")), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_has_ended_is_refused() {
    let fixture = TlsFixture::new();
    let (_tls, addr) =
        serve(&asking(&fixture, ClientCertificate::Required), HandshakeLimits::default()).await;
    let key = KeyPair::generate().expect("key");
    let ended = fixture.client_as(&fixture.authority.sign_with("ended", &[], 1_700_000_000, key));
    let tls = ClientTls::load(&ended).expect("loaded, with a warning");
    assert_eq!(tls.expires_unix(), Some(1_700_000_000));
    let error = refusal(&tls, addr).await;
    assert!(error.contains("CertificateExpired"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_connection_is_verified_and_by_the_roots_of_now() {
    let fixture = TlsFixture::new();
    let (server, addr) =
        serve(&asking(&fixture, ClientCertificate::Optional), HandshakeLimits::default()).await;
    let (config, _) = fixture.client_with(&fixture.authority, "worker", &[]);
    let client = ClientTls::load(&config).expect("loaded");
    let mut first = Link::open(&client, addr).await.expect("connected");
    let answer = first.ask().await.expect("let in");
    let mut second = Link::open(&client, addr).await.expect("connected");
    assert!(!second.is_resumed, "a session would outlive its certificate");
    assert_eq!(second.ask().await.as_ref(), Ok(&answer));

    std::fs::write(fixture.folder.path("ca.pem"), Authority::new().pem).expect("written");
    server.reload().expect("reloaded");
    let error = refusal(&client, addr).await;
    assert!(error.contains("UnknownCA"), "{error}");
    assert_eq!(first.ask().await.as_ref(), Ok(&answer), "a connection that is open goes on");
}

#[test]
fn roots_are_needed_to_ask_for_certificates() {
    let fixture = TlsFixture::new();
    for mode in [ClientCertificate::Optional, ClientCertificate::Required] {
        let config = ServerTlsConfig { client_ca_file: None, ..asking(&fixture, mode) };
        let error = ServerTls::load(&config).expect_err("refused").to_string();
        assert!(error.contains("no roots"), "{error}");
    }
}
