//! New files under a running server.

use std::os::unix::fs::symlink;
use std::time::Duration;

use router_tls::{ClientTls, HandshakeLimits, ServerTls, ServerTlsConfig};

use crate::support::{Folder, Link, TlsFixture, certificate_of, serve, until};

const EVERY: Duration = Duration::from_millis(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_connection_goes_on_and_a_new_one_sees_the_new_certificate() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let old = certificate_of(&fixture.server.certificate_file);
    let client = ClientTls::load(&fixture.client).expect("loaded");
    let mut open = Link::open(&client, addr).await.expect("connected");
    assert_eq!(open.ask().await.as_deref(), Ok("nobody"));
    assert_eq!(open.server, old);

    let new = fixture.renew();
    let before = Link::open(&client, addr).await.expect("connected");
    assert_eq!(before.server, old, "nothing changes before the reload");
    tls.reload().expect("reloaded");
    // The client kept tickets of the old session, which are no longer valid.
    let mut after = Link::open(&client, addr).await.expect("connected");
    assert_eq!((&after.server, after.is_resumed), (&new.der, false));
    assert_eq!(after.ask().await.as_deref(), Ok("nobody"));
    assert_eq!(open.ask().await.as_deref(), Ok("nobody"));
    assert_eq!((tls.reloads().done, tls.reloads().failed), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_new_file_keeps_the_old_one_and_says_why() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let old = certificate_of(&fixture.server.certificate_file);
    let client = ClientTls::load(&fixture.client).expect("loaded");
    let good = std::fs::read_to_string(&fixture.server.certificate_file).expect("read");
    let other = fixture.authority.sign("gateway", &["localhost"]);
    let cases = [
        ("", "server.pem: it holds no certificate"),
        (&good[..good.len() / 2], "server.pem: a PEM section has no end"),
        (&other.certificate, "does not match the first certificate"),
    ];
    for (text, expected) in cases {
        fixture.folder.write("server.pem", text);
        let error = tls.reload().expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(Link::open(&client, addr).await.expect("connected").server, old);
    }
    std::fs::remove_file(&fixture.server.certificate_file).expect("removed");
    let error = tls.reload().expect_err("refused").to_string();
    assert!(error.contains("server.pem") && error.contains("No such file"), "{error}");
    assert_eq!(Link::open(&client, addr).await.expect("connected").server, old);
    assert_eq!((tls.reloads().done, tls.reloads().failed), (0, 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watched_pair_is_taken_when_both_halves_are_there() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let watch = tokio::spawn(tls.clone().watch(EVERY));
    tokio::time::sleep(5 * EVERY).await;
    assert_eq!(tls.reloads().done, 0, "files that stay are not read again");

    let new = fixture.authority.sign("gateway", &["localhost"]);
    fixture.folder.write("server.pem", &new.certificate);
    until("the mismatch is seen", || tls.reloads().failed > 1).await;
    assert_eq!(tls.reloads().done, 0);
    fixture.folder.write("server.key", &new.key);
    until("the pair is loaded", || tls.reloads().done == 1).await;
    let client = ClientTls::load(&fixture.client).expect("loaded");
    assert_eq!(Link::open(&client, addr).await.expect("connected").server, new.der);
    tokio::time::sleep(5 * EVERY).await;
    assert_eq!(tls.reloads().done, 1);
    watch.abort();
}

/// As the kubelet does: `tls.crt` → `..data/tls.crt`, and `..data` → a folder that is replaced as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_swapped_link_on_the_way_is_seen() {
    let fixture = TlsFixture::new();
    let secret = Folder::new();
    let publish = |version: &str| {
        let pair = fixture.authority.sign("gateway", &["localhost"]);
        std::fs::create_dir(secret.path(version)).expect("a folder");
        secret.write(&format!("{version}/tls.crt"), &pair.certificate);
        secret.write(&format!("{version}/tls.key"), &pair.key);
        symlink(version, secret.path("..data_tmp")).expect("a link");
        std::fs::rename(secret.path("..data_tmp"), secret.path("..data")).expect("swapped");
        pair.der
    };
    let first = publish("..1");
    symlink("..data/tls.crt", secret.path("tls.crt")).expect("a link");
    symlink("..data/tls.key", secret.path("tls.key")).expect("a link");
    let config = ServerTlsConfig::new(secret.path("tls.crt"), secret.path("tls.key"));
    let (tls, addr) = serve(&config, HandshakeLimits::default()).await;
    let watch = tokio::spawn(tls.clone().watch(EVERY));
    let client = ClientTls::load(&fixture.client).expect("loaded");
    assert_eq!(Link::open(&client, addr).await.expect("connected").server, first);

    let second = publish("..2");
    until("the swap is seen", || tls.reloads().done == 1).await;
    assert_eq!(Link::open(&client, addr).await.expect("connected").server, second);
    assert_eq!(tls.reloads().failed, 0, "a swap shows both files at once");
    watch.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_side_reloads_as_well() {
    let fixture = TlsFixture::new();
    let (_tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let good = std::fs::read_to_string(fixture.folder.path("ca.pem")).expect("read");
    fixture.folder.write("ca.pem", &crate::support::Authority::new().pem);
    let client = ClientTls::load(&fixture.client).expect("loaded");
    assert!(Link::open(&client, addr).await.is_err());
    let watch = tokio::spawn(client.clone().watch(EVERY));
    fixture.folder.write("ca.pem", &good);
    until("the roots are loaded", || client.reloads().done == 1).await;
    assert!(Link::open(&client, addr).await.is_ok());
    watch.abort();
}

#[test]
fn a_change_between_the_load_and_the_watch_is_not_lost() {
    let fixture = TlsFixture::new();
    let tls = ServerTls::load(&fixture.server).expect("loaded");
    fixture.renew();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let watch = tokio::spawn(tls.clone().watch(EVERY));
        until("the change is seen", || tls.reloads().done == 1).await;
        watch.abort();
    });
}
