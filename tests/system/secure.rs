//! Encryption and authentication: certificates of the gateway, of clients and of engines, keys of an identity
//! provider by URL, keys between gateways and workers, and reloads on SIGHUP.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::support;
use crate::support::site::{Site, chat, mock};
use crate::support::{Process, Scratch, client, free_address, get, open, wait_for};
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use router_engines::client::EngineClient;
use router_tls::{ClientTls, ClientTlsConfig, ServerTls, ServerTlsConfig, TlsListener};
use serde_json::{Value, json};
use tools_mocker::{Dialect, Role};

/// A certificate authority and its files in a folder.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
}

impl Authority {
    fn new(folder: &std::path::Path, name: &str) -> Self {
        let mut parameters = CertificateParams::new(Vec::<String>::new()).expect("parameters");
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(parameters, key).expect("an authority");
        std::fs::write(folder.join(format!("{name}.pem")), issuer.pem()).expect("written");
        Self { issuer, folder: folder.to_owned() }
    }

    /// Writes `NAME.pem` and `NAME.key` for this machine.
    fn issue(&self, name: &str) {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut parameters = CertificateParams::new(names).expect("names");
        parameters.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.signed_by(&key, &self.issuer).expect("a certificate");
        // The key is written first: a pair that does not match changes nothing.
        std::fs::write(self.folder.join(format!("{name}.key")), key.serialize_pem()).expect("written");
        std::fs::write(self.folder.join(format!("{name}.pem")), certificate.pem()).expect("written");
    }
}

fn file(folder: &std::path::Path, name: &str) -> String {
    folder.join(name).display().to_string()
}

/// Returns a client that trusts one authority, with its own certificate or without.
fn over(base: &str, folder: &std::path::Path, authority: &str, own: Option<&str>) -> EngineClient {
    let path = |name: String| folder.join(name);
    let config = ClientTlsConfig {
        ca_file: Some(path(format!("{authority}.pem"))),
        system_roots: false,
        certificate_file: own.map(|own| path(format!("{own}.pem"))),
        key_file: own.map(|own| path(format!("{own}.key"))),
        ..ClientTlsConfig::default()
    };
    EngineClient::new(base, Some(&ClientTls::load(&config).expect("files")))
}

async fn talks(client: &EngineClient, words: usize) -> Result<Value, String> {
    let body = chat(words, 1, 4).to_string();
    let answer = client.post("/v1/chat/completions", body.into()).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&answer).map_err(|error| error.to_string())
}

/// Serves TLS in front of an engine without TLS.
async fn wrap(folder: &std::path::Path, name: &str, engine: String) -> String {
    use axum::serve::Listener;
    let config =
        ServerTlsConfig::new(file(folder, &format!("{name}.pem")), file(folder, &format!("{name}.key")));
    let tls = ServerTls::load(&config).expect("files");
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = tcp.local_addr().expect("bound");
    let mut listener = TlsListener::new(tcp, tls);
    tokio::spawn(async move {
        loop {
            let (mut outside, _) = listener.accept().await;
            let engine = engine.clone();
            tokio::spawn(async move {
                let mut inside = tokio::net::TcpStream::connect(engine).await.expect("the engine");
                let _ended = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
            });
        }
    });
    format!("https://{address}")
}

#[test]
fn clients_and_engines_over_tls() {
    let scratch = Scratch::new("tls");
    let folder = &scratch.0;
    let house = Authority::new(folder, "house");
    let _other = Authority::new(folder, "other");
    ["gateway", "client", "engine"].iter().for_each(|name| house.issue(name));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listen = "127.0.0.1:0".parse().expect("an address");
    let config = mock(Dialect::Vllm, Role::Both, false);
    let mock = runtime.block_on(tools_mocker::Mock::start(config, listen)).expect("a mock engine");
    let plain = mock.url().trim_start_matches("http://").to_owned();
    let engine = runtime.block_on(wrap(folder, "engine", plain));
    let gateway = |name: &str, clients: Option<&str>, ca: &str| {
        let clients = clients.map_or(String::new(), |authority| {
            format!("client_ca_file = {:?}\nclient_certificate = \"required\"\n", file(folder, authority))
        });
        let text = format!(
            "[gateway]\nhealth_interval = \"100ms\"\n[tls]\ncertificate_file = {:?}\nkey_file = {:?}\n{clients}upstream_ca_file = {:?}\n",
            file(folder, "gateway.pem"),
            file(folder, "gateway.key"),
            file(folder, ca),
        );
        let path = scratch.config(name, &text);
        Process::start(&["gateway", "--config", &path, "--worker", &engine])
    };
    runtime.block_on(async {
        let server = gateway("required.toml", Some("house.pem"), "house.pem");
        let base = format!("https://{}", server.address);
        let known = over(&base, folder, "house", Some("client"));
        let mut ready = false;
        for _ in 0..300 {
            ready = known.is_healthy().await;
            if ready {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(ready, "the gateway is ready, and has reached its engine over TLS");
        let answer = talks(&known, 20).await.expect("an answer");
        assert!(answer["choices"][0]["message"]["content"].is_string(), "{answer}");
        let error = talks(&over(&base, folder, "house", None), 20).await.expect_err("no certificate");
        assert!(error.to_lowercase().contains("certificate"), "{error}");
        let error = talks(&over(&base, folder, "other", Some("client")), 20).await.expect_err("not trusted");
        assert!(error.contains("certificate"), "{error}");
        assert!(get(&server.address, "/health").is_err(), "plain HTTP is not answered");

        // A new certificate from another authority takes effect shortly after; open connections continue.
        let next = Authority::new(folder, "next");
        next.issue("gateway");
        let renewed = over(&base, folder, "next", Some("client"));
        let mut took_over = false;
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            took_over = talks(&renewed, 20).await.is_ok();
            if took_over {
                break;
            }
        }
        assert!(took_over, "the new certificate is shown");
        assert!(talks(&known, 20).await.is_ok(), "the old connection still serves");

        // Without a trusted authority the engine is not used, and the gateway gives the reason.
        let server = gateway("distrusts.toml", None, "other.pem");
        let anybody = over(&format!("https://{}", server.address), folder, "next", None);
        let mut error = Ok(Value::Null);
        for _ in 0..100 {
            error = talks(&anybody, 20).await;
            if error.as_ref().is_err_and(|error| error.contains("503")) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(error.as_ref().is_err_and(|error| error.contains("503")), "{error:?}");
    });
}

#[test]
fn one_command_serves_with_keys_and_tls() {
    use std::io::{BufRead, BufReader};
    let scratch = Scratch::new("serve-tls");
    let folder = &scratch.0;
    let house = Authority::new(folder, "house");
    house.issue("gateway");
    let key = router_access::new_key("alice", "acme").expect("a key");
    let keys = scratch.config("keys.toml", &key.lines);
    let text = format!(
        "[serve]\nprefill_workers = 0\n[access]\nkeys_file = {keys:?}\n[tls]\ncertificate_file = {:?}\nkey_file = {:?}\n\
         [transfer]\nsocket_folder = {:?}\n",
        file(folder, "gateway.pem"),
        file(folder, "gateway.key"),
        folder.display().to_string(),
    );
    let path = scratch.config("kvasir.toml", &text);
    let address = free_address();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["serve", "--config", &path, "--listen", &address])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("kvasir starts");
    // `serve` prints its memory plan first, and a curl command when it is ready.
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let curl = lines.map_while(Result::ok).find(|line| line.starts_with("curl")).expect("it becomes ready");
    assert!(curl.contains("https://") && curl.contains("--cacert") && curl.contains("$KVASIR_KEY"), "{curl}");
    // The authority `house` issued the certificate, so the client must trust that authority.
    let command = curl.replace(&file(folder, "gateway.pem"), &file(folder, "house.pem"));
    let pasted =
        std::process::Command::new("sh").args(["-c", &command]).env("KVASIR_KEY", &key.secret).output();
    let ended = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(ended.expect("kill").success());
    assert_eq!(child.wait().expect("its end").code(), Some(0));
    match pasted {
        Ok(pasted) if pasted.status.code() != Some(127) => {
            let answer = String::from_utf8_lossy(&pasted.stdout).into_owned();
            assert!(answer.contains("[DONE]"), "{answer} {}", String::from_utf8_lossy(&pasted.stderr));
        }
        _ => eprintln!("SKIPPED the pasted line: no curl"),
    }
}

#[test]
fn bad_certificates_stop_the_start_with_their_names() {
    let scratch = Scratch::new("bad-tls");
    let house = Authority::new(&scratch.0, "house");
    house.issue("one");
    house.issue("two");
    let cases = [
        ("certificate_file = \"/nowhere/a.pem\"\nkey_file = \"/nowhere/a.key\"", "/nowhere/a.pem"),
        ("certificate_file = \"ONE.pem\"", "go together"),
        ("certificate_file = \"ONE.pem\"\nkey_file = \"TWO.key\"", "does not match"),
        ("client_certificate = \"required\"", "needs certificate_file"),
        ("certificate_file = \"ONE.pem\"\nkey_file = \"ONE.key\"\nclient_certificate = \"required\"", "root"),
    ];
    for (number, (text, expected)) in cases.into_iter().enumerate() {
        let text = text.replace("ONE", &file(&scratch.0, "one")).replace("TWO", &file(&scratch.0, "two"));
        let path = scratch.config(&format!("{number}.toml"), &format!("[tls]\n{text}\n"));
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args([
                "gateway",
                "--config",
                &path,
                "--listen",
                &free_address(),
                "--worker",
                "http://127.0.0.1:1",
            ])
            .output()
            .expect("kvasir runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{expected}: {said}");
    }
}

/// An identity provider: discovery, keys, and a count of key requests.
struct Provider {
    issuer: String,
    keys: Arc<std::sync::Mutex<Vec<Value>>>,
    asked: Arc<std::sync::atomic::AtomicU32>,
}

impl Provider {
    fn start(runtime: &tokio::runtime::Runtime) -> Self {
        use axum::routing::get;
        let keys = Arc::new(std::sync::Mutex::new(Vec::new()));
        let asked = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let tcp = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
        let issuer = format!("http://{}", tcp.local_addr().expect("bound"));
        let told = json!({ "issuer": issuer, "jwks_uri": format!("{issuer}/keys") }).to_string();
        let (shown, count) = (Arc::clone(&keys), Arc::clone(&asked));
        let routes = axum::Router::new()
            .route("/.well-known/openid-configuration", get(move || async move { told }))
            .route(
                "/keys",
                get(move || async move {
                    count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    json!({ "keys": *shown.lock().expect("not poisoned") }).to_string()
                }),
            );
        runtime.spawn(async move { axum::serve(tcp, routes).await });
        Self { issuer, keys, asked }
    }

    /// Creates a signing key that the provider publishes.
    fn key(&self, id: &str) -> EncodingKey {
        let pair = aws_lc_rs::signature::Ed25519KeyPair::generate().expect("a key");
        let key = EncodingKey::from_ed_der(pair.to_pkcs8v1().expect("pkcs8").as_ref());
        let mut jwk = Jwk::from_encoding_key(&key, Algorithm::EdDSA).expect("a jwk");
        jwk.common.key_id = Some(id.to_owned());
        let jwk = serde_json::to_value(jwk).expect("JSON");
        self.keys.lock().expect("not poisoned").push(jwk);
        key
    }

    fn token(&self, key: &EncodingKey, id: &str) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let mut header = Header::new(Algorithm::EdDSA);
        header.kid = Some(id.to_owned());
        let claims = json!({ "iss": self.issuer, "aud": "kvasir", "sub": "alice", "tenant": "acme", "exp": now + 600 });
        encode(&header, &claims, key).expect("signed")
    }
}

#[test]
fn an_identity_providers_keys_come_by_url() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let provider = Provider::start(&runtime);
    let first = provider.key("first");
    // Only the issuer is configured: it publishes the location of its keys.
    let config = format!("[access]\ntoken_issuer = {:?}\ntoken_audience = \"kvasir\"\n", provider.issuer);
    let site = Site::start("jwks", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], &config);
    let address = &site.gateway.address;
    let ask = |token: &str| client(address, Some(token), "/v1/chat/completions", Some(&chat(10, 1, 4))).0;
    wait_for("the first key", || ask(&provider.token(&first, "first")) == 200);
    // A newly used key is fetched from the provider, but not for every token and at any time.
    let second = provider.key("second");
    let before = provider.asked.load(std::sync::atomic::Ordering::Relaxed);
    wait_for("the second key", || ask(&provider.token(&second, "second")) == 200);
    let stranger = aws_lc_rs::signature::Ed25519KeyPair::generate().expect("a key");
    let stranger = EncodingKey::from_ed_der(stranger.to_pkcs8v1().expect("pkcs8").as_ref());
    for _ in 0..40 {
        assert_eq!(ask(&provider.token(&stranger, "made-up")), 401);
    }
    let asked = provider.asked.load(std::sync::atomic::Ordering::Relaxed) - before;
    assert!((1..=3).contains(&asked), "asked {asked} times");
    assert_eq!(ask(&provider.token(&first, "first")), 200);
    assert_eq!(ask(&provider.token(&stranger, "first")), 401, "another's signature");
}

#[test]
fn gateways_of_a_fleet_share_the_limits_of_keys() {
    let scratch = Scratch::new("shared-limits");
    let key = router_access::new_key("alice", "acme").expect("a key");
    let limited = key.lines.replace("models = [\"*\"]", "models = [\"*\"]\nrequests_per_minute = 30");
    assert_ne!(limited, key.lines);
    let keys = scratch.config("keys.toml", &limited);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listen = "127.0.0.1:0".parse().expect("an address");
    let mock = runtime.block_on(tools_mocker::Mock::start(mock(Dialect::Vllm, Role::Both, false), listen));
    let mock = mock.expect("a mock engine");
    let addresses = [free_address(), free_address(), free_address()];
    let start = |at: usize, peers: &[usize]| {
        let peers: Vec<String> = peers.iter().map(|peer| format!("http://{}", addresses[*peer])).collect();
        let text = format!(
            "[gateway]\nlisten = {:?}\nhealth_interval = \"100ms\"\npeers = {peers:?}\n[access]\nkeys_file = {keys:?}\n",
            addresses[at]
        );
        let path = scratch.config(&format!("{at}.toml"), &text);
        let gateway = Process::start_with_at(
            &addresses[at],
            &["gateway", "--config", &path, "--worker", &mock.url()],
            &[("KVASIR_PEER_KEY", "fleet-secret")],
        );
        gateway.wait_healthy();
        gateway
    };
    let ask = |gateway: &Process| {
        let body = chat(10, 1, 1);
        client(&gateway.address, Some(&key.secret), "/v1/chat/completions", Some(&body)).0
    };
    let mut gateways = vec![start(0, &[1, 2]), start(1, &[0, 2])];
    let started = std::time::Instant::now();
    let (mut served, mut refused) = (0_u64, 0);
    while refused < 6 {
        for gateway in &gateways {
            match ask(gateway) {
                200 => served += 1,
                429 => refused += 1,
                other => panic!("{other}"),
            }
        }
        assert!(served < 60, "each by itself would have served thirty");
        // Longer than the gateways' exchange takes.
        std::thread::sleep(Duration::from_millis(150));
    }
    let refilled = 1 + started.elapsed().as_secs() / 2;
    // Until the exchange, each gateway may admit one request that the other does not know of.
    assert!((30..=30 + refilled + 2).contains(&served), "{served} served, {refilled} refilled");
    // A gateway that starts now takes over the amounts that the others have charged.
    gateways.push(start(2, &[0, 1]));
    wait_for("the third gateway to hear of it", || ask(&gateways[2]) == 429);
}

#[test]
fn closed_gateways_of_a_fleet_know_each_other() {
    let scratch = Scratch::new("closed-peers");
    let key = router_access::new_key("alice", "acme").expect("a key");
    let keys = scratch.config("keys.toml", &key.lines);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listen = "127.0.0.1:0".parse().expect("an address");
    let mock = runtime.block_on(tools_mocker::Mock::start(mock(Dialect::Vllm, Role::Both, false), listen));
    let mock = mock.expect("a mock engine");
    let start = |name: &str, peer: &str, secret: &str| {
        let text = format!(
            "[gateway]\nhealth_interval = \"100ms\"\npeers = [{peer:?}]\n[access]\nkeys_file = {keys:?}\n"
        );
        let path = scratch.config(name, &text);
        Process::start_with(
            &["gateway", "--config", &path, "--worker", &mock.url()],
            &[("KVASIR_PEER_KEY", secret)],
        )
    };
    let mut a = start("a.toml", "http://127.0.0.1:1", "fleet-secret");
    let b = start("b.toml", &a.url(), "fleet-secret");
    a.kill();
    let text = format!(
        "[gateway]\nhealth_interval = \"100ms\"\npeers = [{:?}]\n[access]\nkeys_file = {keys:?}\n",
        b.url()
    );
    scratch.config("a.toml", &text);
    a.restart();
    a.wait_healthy();
    b.wait_healthy();
    let peers_requests = |gateway: &Process, secret: &str| {
        let head = format!(
            "GET /kvasir/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-kvasir-peer: {secret}\r\n\r\n"
        );
        let text = support::raw(&gateway.address, &head);
        let status: Value =
            serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap_or_default()).unwrap_or_default();
        status["workers"][0]["peers_requests"].as_u64()
    };
    let hang = tools_mocker::Fault {
        kind: tools_mocker::FaultKind::Hang,
        probability: 1.0,
        count: None,
        millis: 0,
        tokens: 1,
    };
    mock.fault(hang).expect("a fault");
    let body = chat(10, 1, 4).to_string();
    let held = support::raw_open(
        &a.address,
        &format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n{body}",
            key.secret,
            body.len()
        ),
    );
    wait_for("b to hear of a's request", || peers_requests(&b, "fleet-secret") == Some(1));
    assert_eq!(peers_requests(&b, "guess"), None, "another key is none");
    assert_eq!(client(&b.address, Some(&key.secret), "/kvasir/status", None).0, 403);
    assert_eq!(client(&b.address, None, "/kvasir/loads", Some(&json!({}))).0, 401);
    drop(held);
    wait_for("b to hear of its end", || peers_requests(&b, "fleet-secret") == Some(0));
}

#[test]
fn a_hang_up_opens_the_audit_log_anew() {
    let scratch = Scratch::new("hang-up");
    let log = scratch.0.join("audit.jsonl");
    let config = format!("[access]\naudit_file = {:?}\n", log.display().to_string());
    let site =
        Site::start("hang-up-site", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], &config);
    let lines = |path: &std::path::Path| std::fs::read_to_string(path).map_or(0, |text| text.lines().count());
    assert_eq!(site.chat(&chat(10, 1, 4)).0, 200);
    wait_for("the first line", || lines(&log) == 1);
    let old = scratch.0.join("audit.old");
    std::fs::rename(&log, &old).expect("renamed");
    site.gateway.signal("-HUP");
    wait_for("the new file", || log.exists());
    assert_eq!(site.chat(&chat(10, 2, 4)).0, 200);
    wait_for("a line in it", || lines(&log) == 1);
    assert_eq!(lines(&old), 1);
    let line: Value = serde_json::from_str(&std::fs::read_to_string(&log).expect("the log")).expect("JSON");
    assert_eq!((&line["client"], &line["status"]), (&json!("127.0.0.1"), &json!(200)), "{line}");
    // A line is counted after it was written to the file.
    wait_for("both to be counted", || site.gateway.metric("kvasir_gateway_audit_log_lines_total") == 2.0);
    // The disconnect of a client is logged as such.
    site.mocks[0].heal();
    let hang = tools_mocker::FaultKind::Hang;
    let hang = tools_mocker::Fault { kind: hang, probability: 1.0, count: None, millis: 0, tokens: 1 };
    site.mocks[0].fault(hang).expect("a fault");
    let left = open(&site.gateway.address, "/v1/chat/completions", &chat(10, 3, 4)).expect("sent");
    wait_for("it to be inside", || {
        get(&site.gateway.address, "/kvasir/status").is_ok_and(|(_, text)| text.contains("\"active\":1"))
    });
    drop(left);
    wait_for("its line", || lines(&log) == 2);
    let text = std::fs::read_to_string(&log).expect("the log");
    let line: Value = serde_json::from_str(text.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&line["status"], &line["reason"]), (&json!(499), &json!("client_gone")), "{line}");
}

/// Returns the address of the first worker of a `kvasir serve`, from the worker's command line.
fn worker_of(serve: &Process) -> Option<String> {
    let id = serve.child.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    children.split_whitespace().find_map(|child| {
        let command = std::fs::read_to_string(format!("/proc/{child}/cmdline")).ok()?;
        let arguments: Vec<&str> = command.split('\0').collect();
        let at = arguments.iter().position(|argument| *argument == "--listen")?;
        let is_worker = arguments.get(1) == Some(&"worker");
        arguments.get(at + 1).filter(|_| is_worker).map(|address| (*address).to_owned())
    })
}

#[test]
fn workers_of_serve_answer_nobody_without_the_peer_key() {
    let scratch = Scratch::new("serve-workers");
    let text = format!(
        "[serve]\nprefill_workers = 0\n[transfer]\nsocket_folder = {:?}\n",
        scratch.0.display().to_string()
    );
    let path = scratch.config("kvasir.toml", &text);
    let serve = Process::start_with(&["serve", "--config", &path], &[("KVASIR_PEER_KEY", "fleet-secret")]);
    serve.wait_healthy();
    let worker = worker_of(&serve).expect("a worker");
    assert_eq!(client(&worker, None, "/health", None).0, 200);
    let paths = ["/kvasir/worker", "/metrics", "/v1/models", "/version", "/kv_event_sources", "/nowhere"];
    for path in paths {
        assert_eq!(client(&worker, None, path, None).0, 401, "{path}");
        assert_eq!(client(&worker, Some("guess"), path, None).0, 401, "{path}");
    }
    let body = json!({"prompt": [65, 66, 67], "max_tokens": 2});
    for path in ["/v1/completions", "/v1/chat/completions", "/reset_prefix_cache"] {
        assert_eq!(client(&worker, None, path, Some(&body)).0, 401, "{path}");
    }
    assert_eq!(client(&worker, Some("fleet-secret"), "/kvasir/worker", None).0, 200);
    assert_eq!(client(&serve.address, None, "/v1/completions", Some(&body)).0, 200, "through the gateway");
}

/// Creates a file that only its owner can read.
fn secret(scratch: &Scratch, name: &str, text: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = scratch.config(name, text);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("private");
    path
}

#[test]
fn a_worker_behind_a_key_and_tls_is_reached_by_its_gateway() {
    let scratch = Scratch::new("worker-key");
    let folder = &scratch.0;
    let house = Authority::new(folder, "house");
    house.issue("worker");
    let text = format!(
        "[worker]\napi_key_file = {:?}\ncertificate_file = {:?}\nprivate_key_file = {:?}\n\
         [transfer]\nsocket_folder = {:?}\n",
        secret(&scratch, "worker.secret", "worker-secret\n"),
        file(folder, "worker.pem"),
        file(folder, "worker.key"),
        folder.display().to_string(),
    );
    let path = scratch.config("worker.toml", &text);
    let worker = Process::start(&["worker", "--role", "both", "--threads", "1", "--config", &path]);
    let url = format!("https://{}", worker.address);
    let keys = secret(&scratch, "engines.secret", &format!("others-key\n{url} worker-secret\n"));
    let text = format!(
        "[gateway]\nhealth_interval = \"100ms\"\nengine_key_file = {keys:?}\n[tls]\nupstream_ca_file = {:?}\n",
        file(folder, "house.pem"),
    );
    let path = scratch.config("gateway.toml", &text);
    let gateway = Process::start(&["gateway", "--config", &path, "--worker", &url]);
    gateway.wait_healthy();
    let body = json!({"prompt": [65, 66, 67], "max_tokens": 2});
    assert_eq!(client(&gateway.address, Some("clients-key"), "/v1/completions", Some(&body)).0, 200);

    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let direct = over(&url, folder, "house", None);
    runtime.block_on(async {
        assert!(direct.is_healthy().await, "health needs no key");
        let error = direct.get("/metrics").await.expect_err("no key").to_string();
        assert!(error.contains("401"), "{error}");
    });
    assert!(get(&worker.address, "/health").is_err(), "plain HTTP is not answered");

    // A file that all users can read is refused.
    let open = scratch.config("open.secret", "worker-secret\n");
    let path = scratch.config("open.toml", &format!("[worker]\napi_key_file = {open:?}\n"));
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["worker", "--role", "both", "--config", &path, "--listen", &free_address()])
        .output()
        .expect("kvasir runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("chmod 600"), "{said}");
}

#[test]
fn an_open_gateway_beyond_loopback_says_so_once() {
    use std::io::Read;
    let listen = free_address().replace("127.0.0.1", "0.0.0.0");
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["gateway", "--worker", "http://127.0.0.1:1", "--listen", &listen])
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("kvasir starts");
    let address = listen.replace("0.0.0.0", "127.0.0.1");
    // The gateway answers 503, since there is no worker; its warnings were printed before.
    wait_for("the gateway to listen", || get(&address, "/health").is_ok());
    child.kill().expect("killed");
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("its log");
    child.wait().expect("its end");
    assert_eq!(said.matches("asks for no key").count(), 1, "{said}");
    assert!(said.contains("WARN") && said.contains("access.keys_file"), "{said}");
}

/// Waits until a gateway can serve, as seen by a client over TLS.
async fn wait_ready(client: &EngineClient) {
    for _ in 0..600 {
        if client.is_healthy().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{} is not ready", client.base());
}

#[test]
fn a_certificate_makes_a_client_and_an_administrator_only_by_name() {
    use router_engines::key::ApiKey;
    use router_engines::upstream::Upstream;
    let scratch = Scratch::new("certificates");
    let folder = &scratch.0;
    let house = Authority::new(folder, "house");
    ["gateway", "client", "ops", "stranger"].iter().for_each(|name| house.issue(name));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listen = "127.0.0.1:0".parse().expect("an address");
    let mock = runtime.block_on(tools_mocker::Mock::start(mock(Dialect::Vllm, Role::Both, false), listen));
    let mock = mock.expect("a mock engine");
    let gateway = |name: &str, more: &str| {
        let text = format!(
            "[gateway]\nhealth_interval = \"100ms\"\n[tls]\ncertificate_file = {:?}\nkey_file = {:?}\n\
             client_ca_file = {:?}\nclient_certificate = \"required\"\n{more}",
            file(folder, "gateway.pem"),
            file(folder, "gateway.key"),
            file(folder, "house.pem"),
        );
        let path = scratch.config(name, &text);
        Process::start(&["gateway", "--config", &path, "--worker", &mock.url()])
    };
    let paths = ["/kvasir/status", "/metrics", "/kvasir/decisions", "/kvasir/snapshot"];
    let answered = async |client: &EngineClient, path: &str| match client.get_large(path).await {
        Ok(_) => "200".to_owned(),
        Err(error) => error.to_string(),
    };
    runtime.block_on(async {
        let without_keys = gateway("without.toml", "");
        let client = over(&format!("https://{}", without_keys.address), folder, "house", Some("client"));
        wait_ready(&client).await;
        assert!(talks(&client, 20).await.is_ok());
        for path in paths {
            let said = answered(&client, path).await;
            assert!(said.contains("403"), "{path}: {said}");
        }

        let keys = "[[certificate]]\nname = \"a client\"\nidentity = \"cn:client\"\ntenant = \"acme\"\n\
                    [[certificate]]\nname = \"operations\"\nidentity = \"cn:ops\"\ntenant = \"house\"\nadmin = true\n";
        let keys = scratch.config("certificates.keys", keys);
        let with_keys = gateway("with.toml", &format!("[access]\nkeys_file = {keys:?}\n"));
        let base = format!("https://{}", with_keys.address);
        let client = over(&base, folder, "house", Some("client"));
        wait_ready(&client).await;
        assert!(talks(&client, 20).await.is_ok());
        // OpenAI's clients always send a key.
        let files = ClientTlsConfig {
            ca_file: Some(folder.join("house.pem")),
            system_roots: false,
            certificate_file: Some(folder.join("client.pem")),
            key_file: Some(folder.join("client.key")),
            ..ClientTlsConfig::default()
        };
        let tls = ClientTls::load(&files).expect("files");
        let with_key = Upstream::with_key(&base, Some(&tls), ApiKey::new("none").as_ref());
        assert!(talks(&EngineClient::over(&with_key), 20).await.is_ok());
        let ops = over(&base, folder, "house", Some("ops"));
        let stranger = over(&base, folder, "house", Some("stranger"));
        for path in paths {
            let said = answered(&client, path).await;
            assert!(said.contains("403"), "{path}: {said}");
            assert_eq!(answered(&ops, path).await, "200", "{path}");
            let said = answered(&stranger, path).await;
            assert!(said.contains("401"), "{path}: {said}");
        }
        assert!(talks(&stranger, 20).await.is_err_and(|error| error.contains("401")), "nobody knows it");
    });
}

#[test]
fn an_open_gateway_believes_only_peers_that_show_the_key() {
    let scratch = Scratch::new("open-peers");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listen = "127.0.0.1:0".parse().expect("an address");
    let mock = runtime.block_on(tools_mocker::Mock::start(mock(Dialect::Vllm, Role::Both, false), listen));
    let mock = mock.expect("a mock engine");
    let path = scratch
        .config("kvasir.toml", "[gateway]\nhealth_interval = \"100ms\"\npeers = [\"http://127.0.0.1:1\"]\n");
    let url = mock.url();
    let arguments = ["gateway", "--config", &path, "--worker", &url];
    let status = |gateway: &Process, path: &str, more: &str, body: Option<&Value>| {
        let (method, body) = body.map_or(("GET", String::new()), |body| ("POST", body.to_string()));
        let text = support::raw(
            &gateway.address,
            &format!(
                "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{more}content-length: {}\r\n\r\n{body}",
                gateway.address,
                body.len()
            ),
        );
        text.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok()).expect("a status")
    };
    let loads = |sequence: u64| json!({ "gateway": 7, "sequence": sequence, "workers": {} });

    let keyed = Process::start_with(&arguments, &[("KVASIR_PEER_KEY", "fleet-secret")]);
    keyed.wait_healthy();
    for more in ["", "x-kvasir-peer: guess\r\n", "authorization: Bearer fleet-secret\r\n"] {
        assert_eq!(status(&keyed, "/kvasir/loads", more, Some(&loads(1))), 403, "{more:?}");
        assert_eq!(status(&keyed, "/kvasir/snapshot", more, None), 403, "{more:?}");
    }
    let shown = "x-kvasir-peer: fleet-secret\r\n";
    assert_eq!(status(&keyed, "/kvasir/loads", shown, Some(&loads(2))), 200);
    assert_eq!(status(&keyed, "/kvasir/snapshot", shown, None), 200);
    assert_eq!(status(&keyed, "/v1/models", "", None), 200, "it is open to clients");

    // Without a key, gateways accept each other on one machine, but not requests that come through a proxy.
    let unkeyed = Process::start(&arguments);
    unkeyed.wait_healthy();
    assert_eq!(status(&unkeyed, "/kvasir/loads", "", Some(&loads(1))), 200);
    let forwarded = "x-forwarded-for: 10.0.0.9\r\n";
    assert_eq!(status(&unkeyed, "/kvasir/loads", forwarded, Some(&loads(2))), 403);
    assert_eq!(status(&unkeyed, "/kvasir/snapshot", forwarded, None), 403);
}

/// Starts a mock of vLLM and a gateway of this configuration in front of it, both ready.
fn before_a_mock(
    runtime: &tokio::runtime::Runtime,
    scratch: &Scratch,
    text: &str,
) -> (tools_mocker::Mock, Process) {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let mock = runtime.block_on(tools_mocker::Mock::start(mock(Dialect::Vllm, Role::Both, false), listen));
    let mock = mock.expect("a mock engine");
    let path = scratch.config("kvasir.toml", text);
    let gateway = Process::start(&["gateway", "--config", &path, "--worker", &mock.url()]);
    gateway.wait_healthy();
    (mock, gateway)
}

const ABOUT_ITSELF: [&str; 5] =
    ["/metrics", "/kvasir/status", "/kvasir/decisions", "/kvasir/history", "/debug/route?prompt=a"];

#[test]
fn an_open_gateway_tells_of_itself_to_its_own_machine_alone() {
    let scratch = Scratch::new("local-only");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let text = "[gateway]\nhealth_interval = \"100ms\"\n";
    let (_mock, gateway) = before_a_mock(&runtime, &scratch, text);
    let status = |path: &str, headers: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n\r\n");
        let answer = support::raw(&gateway.address, &request);
        answer.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok()).expect("a status")
    };
    for path in ABOUT_ITSELF {
        assert_ne!(status(path, "host: localhost"), 403, "{path}");
        assert_eq!(status(path, "host: localhost\r\nx-forwarded-for: 10.0.0.9"), 403, "{path}");
        assert_eq!(status(path, "host: evil.example"), 403, "{path}: a page whose name points here");
    }
    for path in ["/health", "/v1/models", "/kvasir/"] {
        assert_eq!(status(path, "host: evil.example"), 200, "{path}");
    }
}

#[test]
fn administrators_have_a_listener_of_their_own() {
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("admin-listen");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let admin = free_address();
    let text = format!("[gateway]\nhealth_interval = \"100ms\"\nadmin_listen = {admin:?}\n");
    let (_mock, gateway) = before_a_mock(&runtime, &scratch, &text);
    let status = |address: &str, path: &str| get(address, path).expect("an answer").0;
    for path in ABOUT_ITSELF.into_iter().chain(["/kvasir/", "/kvasir", "/kvasir/page.js"]) {
        assert_eq!(status(&gateway.address, path), 404, "{path} has left the API's port");
        assert_ne!(status(&admin, path), 404, "{path}");
    }
    for path in ["/metrics", "/kvasir/status", "/kvasir/", "/health"] {
        assert_eq!(status(&admin, path), 200, "{path}");
    }
    assert_eq!((status(&gateway.address, "/v1/models"), status(&admin, "/v1/models")), (200, 404));
    assert_eq!(status(&gateway.address, "/kvasir/snapshot"), 200, "peers know each other by the API's port");
    drop(gateway);

    // With keys the listener requires them, too.
    let key = router_access::new_key("boss", "house").expect("a key");
    let keys = scratch.config("keys.toml", &format!("{}admin = true\n", key.lines));
    let with_keys = format!("{text}[access]\nkeys_file = {keys:?}\n");
    let (_mock, gateway) = before_a_mock(&runtime, &scratch, &with_keys);
    assert_eq!(client(&admin, None, "/metrics", None).0, 401);
    assert_eq!(client(&admin, Some(&key.secret), "/metrics", None).0, 200);
    drop(gateway);

    // A Unix socket for the owner; a socket file that a killed process left is replaced.
    let socket = scratch.0.join("admin.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).expect("a socket"));
    let place = format!("unix:{}", socket.display());
    let text = format!("[gateway]\nhealth_interval = \"100ms\"\nadmin_listen = {place:?}\n");
    let (_mock, mut gateway) = before_a_mock(&runtime, &scratch, &text);
    let mode = std::fs::metadata(&socket).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("a connection");
    let request = b"GET /kvasir/status HTTP/1.1\r\nhost: kvasir\r\nconnection: close\r\n\r\n";
    stream.write_all(request).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"workers\""), "{answer}");
    gateway.stop();
    assert!(!socket.exists(), "it goes with its gateway");
}
