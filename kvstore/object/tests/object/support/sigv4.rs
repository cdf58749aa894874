//! Verification of AWS Signature Version 4, written from the specification ("Signature Version 4 for API
//! requests", Amazon S3 API reference) with HMAC and SHA-256 of aws-lc-rs: independent of the client's code.

use aws_lc_rs::{constant_time, digest, hmac};
use http::request::Parts;

use super::time;

/// The account whose signatures are accepted.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    pub(crate) key_id: String,
    pub(crate) secret: String,
    pub(crate) token: Option<String>,
    pub(crate) region: String,
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

pub(crate) fn percent_decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    out
}

fn percent_encode(bytes: &[u8], keep_slash: bool) -> String {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || (keep_slash && byte == b'/');
    bytes
        .iter()
        .map(|byte| if plain(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Checks a request's signature; the error describes the fault.
pub(crate) fn verify(parts: &Parts, body: &[u8], account: &Account, now_unix_s: i64) -> Result<(), String> {
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let authorization = header("authorization").ok_or("no authorization")?;
    let fields = authorization.strip_prefix("AWS4-HMAC-SHA256 ").ok_or("other algorithm")?;
    let field = |name: &str| {
        let mut all = fields.split(',').map(str::trim);
        all.find_map(|field| field.strip_prefix(name)?.strip_prefix('=')).ok_or(format!("no {name}"))
    };
    let (credential, signed, signature) =
        (field("Credential")?, field("SignedHeaders")?, field("Signature")?);
    let scope: Vec<&str> = credential.split('/').collect();
    let [key_id, date, region, "s3", "aws4_request"] = scope[..] else { return Err("scope".into()) };
    let timestamp = header("x-amz-date").ok_or("no x-amz-date")?;
    let near = (-900..=900).any(|skew| time::basic(now_unix_s + skew) == timestamp);
    if key_id != account.key_id || region != account.region || !timestamp.starts_with(date) || !near {
        return Err("credential, region or date".into());
    }
    if header("x-amz-security-token") != account.token.as_deref() {
        return Err("session token".into());
    }
    let names: Vec<&str> = signed.split(';').collect();
    for name in parts.headers.keys().map(http::HeaderName::as_str) {
        if (name == "host" || name.starts_with("x-amz-")) && !names.contains(&name) {
            return Err(format!("{name} is not signed"));
        }
    }
    if !names.is_sorted() || !names.contains(&"host") {
        return Err("signed headers".into());
    }
    let payload_hash = header("x-amz-content-sha256").ok_or("no payload hash")?;
    if payload_hash != sha256(body) {
        return Err("payload hash".into());
    }

    let mut query: Vec<(String, String)> = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| {
            (percent_encode(&percent_decode(name), false), percent_encode(&percent_decode(value), false))
        })
        .collect();
    query.sort();
    let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut headers = String::new();
    for name in &names {
        let value = header(name).ok_or(format!("signed header {name} is missing"))?;
        headers.push_str(&format!("{name}:{}\n", value.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
    let path = percent_encode(&percent_decode(parts.uri.path()), true);
    let canonical = format!(
        "{}\n{path}\n{}\n{headers}\n{signed}\n{payload_hash}",
        parts.method.as_str(),
        query.join("&")
    );
    let to_sign = format!(
        "AWS4-HMAC-SHA256\n{timestamp}\n{date}/{region}/s3/aws4_request\n{}",
        sha256(canonical.as_bytes())
    );
    let mac = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
    };
    let key = ["s3", "aws4_request"]
        .iter()
        .fold(mac(&mac(format!("AWS4{}", account.secret).as_bytes(), date), region), |key, part| {
            mac(&key, part)
        });
    let expected = hex(&mac(&key, &to_sign));
    constant_time::verify_slices_are_equal(expected.as_bytes(), signature.as_bytes())
        .map_err(|_| "signature".into())
}

/// The GET example of the S3 API reference, "Authenticating Requests: Using the Authorization Header".
#[test]
fn the_published_example_verifies_and_a_changed_one_does_not() {
    let request = |signature: &str| {
        let hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature={signature}"
        );
        let request = http::Request::get("/test.txt")
            .header("host", "examplebucket.s3.amazonaws.com")
            .header("range", "bytes=0-9")
            .header("x-amz-content-sha256", hash)
            .header("x-amz-date", "20130524T000000Z")
            .header("authorization", authorization);
        request.body(()).expect("valid request").into_parts().0
    };
    let account = Account {
        key_id: "AKIAIOSFODNN7EXAMPLE".into(),
        secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
        token: None,
        region: "us-east-1".into(),
    };
    let good = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41";
    let now = 1_369_353_600;
    assert_eq!(verify(&request(good), b"", &account, now), Ok(()));
    assert!(verify(&request(&good.replace('f', "e")), b"", &account, now).is_err());
    assert!(verify(&request(good), b"x", &account, now).is_err());
    assert!(verify(&request(good), b"", &account, now + 10_000).is_err());
}
