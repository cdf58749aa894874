//! Accepted contents of files, and the errors for all others.

use base64::Engine as _;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PKCS_RSA_SHA256};
use router_tls::{ClientCertificate, HandshakeLimits, ServerTls, ServerTlsConfig, TlsError};

use crate::support::{Authority, TlsFixture, ask, serve};

fn armour(label: &str, der: &[u8]) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_all_forms_are_taken() {
    let fixture = TlsFixture::new();
    let forms = [
        ("PRIVATE KEY", &PKCS_ECDSA_P256_SHA256, false),
        ("PRIVATE KEY", &PKCS_ED25519, false),
        ("PRIVATE KEY", &PKCS_RSA_SHA256, false),
        ("RSA PRIVATE KEY", &PKCS_RSA_SHA256, true),
        ("EC PRIVATE KEY", &PKCS_ECDSA_P256_SHA256, true),
    ];
    for (label, algorithm, is_inner) in forms {
        let key = KeyPair::generate_for(algorithm).expect("key");
        let pkcs8 = key.serialize_der();
        // PKCS#1 and SEC1 keys are the contents of PKCS#8's OCTET STRING, from the second SEQUENCE on.
        let from = if is_inner { second_sequence(&pkcs8) } else { 0 };
        let pair = fixture.authority.sign_with("gateway", &["localhost"], 4_000_000_000, key);
        fixture.folder.write("server.pem", &format!("a line of text\n{}", pair.certificate));
        fixture.folder.write("server.key", &armour(label, &pkcs8[from..]));
        let (_tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
        assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"), "{label} {algorithm:?}");
    }
}

/// Returns the offset of the contents of the OCTET STRING of a PKCS#8 key.
fn second_sequence(pkcs8: &[u8]) -> usize {
    let header =
        |at: usize| if pkcs8[at + 1] & 0x80 == 0 { 2 } else { 2 + usize::from(pkcs8[at + 1] & 0x7f) };
    let version = header(0);
    let algorithm = version + 3;
    let octets = algorithm + 2 + usize::from(pkcs8[algorithm + 1]);
    assert_eq!((pkcs8[version], pkcs8[algorithm], pkcs8[octets]), (2, 0x30, 4));
    octets + header(octets)
}

#[test]
fn errors_name_the_file_and_what_is_wrong() {
    let fixture = TlsFixture::new();
    let write = |name: &str, text: &str| fixture.folder.write(name, text);
    let own = fixture.server.clone();
    let missing = fixture.folder.path("missing");
    let empty = write("empty", "");
    let key_text = std::fs::read_to_string(&own.key_file).expect("read");
    let other = write("other.key", &Authority::new().sign("x", &[]).key);
    let encrypted = write("encrypted.key", &armour("ENCRYPTED PRIVATE KEY", b"1234"));
    let broken = write("broken.key", &key_text.replace("END PRIVATE", "END"));
    let nonsense_key = write("nonsense.key", &armour("PRIVATE KEY", b"1234"));
    let nonsense = write("nonsense.pem", &armour("CERTIFICATE", b"1234"));
    let not_base64 = write("text.pem", "-----BEGIN CERTIFICATE-----\n****\n-----END CERTIFICATE-----\n");
    let large = write("large", &" ".repeat((4 << 20) + 1));
    let with =
        |certificate: &std::path::PathBuf, key: &std::path::PathBuf| ServerTlsConfig::new(certificate, key);
    let roots = |file: &std::path::PathBuf| ServerTlsConfig {
        client_ca_file: Some(file.clone()),
        client_certificate: ClientCertificate::Required,
        ..own.clone()
    };
    let (certificate, key) = (&own.certificate_file, &own.key_file);
    let cases = [
        (with(&missing, key), "reading", "missing: No such file"),
        (with(certificate, &missing), "reading", "missing: No such file"),
        (roots(&missing), "reading", "missing: No such file"),
        (with(&empty, key), "empty:", "it holds no certificate in PEM form"),
        (with(key, key), "server.key:", "it holds no certificate in PEM form"),
        (with(certificate, &empty), "empty:", "it holds no private key in PEM form"),
        (with(certificate, certificate), "server.pem:", "it holds no private key in PEM form"),
        (roots(&empty), "empty:", "it holds no certificate in PEM form"),
        (with(certificate, &other), "other.key", "does not match the first certificate in"),
        (with(certificate, &encrypted), "encrypted.key:", "its private key is encrypted"),
        (with(certificate, &broken), "broken.key:", "a PEM section has no end"),
        (with(certificate, &nonsense_key), "nonsense.key:", "its private key cannot be used"),
        (with(&nonsense, key), "nonsense.pem:", "its first certificate cannot be read"),
        (with(&not_base64, key), "text.pem:", "a PEM section is not base64"),
        (roots(&nonsense), "nonsense.pem:", "certificate 1 cannot be a root"),
        (roots(&large), "large:", "larger than 4194304 bytes"),
        (with(&std::env::temp_dir(), key), "reading", "Is a directory"),
    ];
    let secret: Vec<&str> = key_text.lines().filter(|line| !line.starts_with('-')).collect();
    for (config, file, reason) in cases {
        let error = ServerTls::load(&config).expect_err(reason);
        let text = error.to_string();
        assert!(text.contains(file) && text.contains(reason), "{text}");
        let shown = format!("{error:?} {text}");
        assert!(!secret.iter().any(|line| shown.contains(line)), "a key is shown: {shown}");
    }
    let mismatch = ServerTls::load(&with(certificate, &other));
    assert!(matches!(mismatch, Err(TlsError::KeyMismatch { .. })), "{mismatch:?}");
}
