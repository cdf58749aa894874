//! Tokens signed with keys that are made when the test runs.

use std::time::Duration;

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair,
    RsaKeyPair,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{EncodingKey, Header, encode};
use serde_json::{Value, json};

use super::*;
use crate::grant::{LimitConfig, Models};
use crate::limits::Scope;

const NOW: u64 = 1_800_000_000;

struct Signer {
    algorithm: Algorithm,
    key: EncodingKey,
}

impl Signer {
    fn new(algorithm: Algorithm) -> Self {
        let key = match algorithm {
            Algorithm::Es256 | Algorithm::Es384 => {
                let curve = if algorithm == Algorithm::Es256 {
                    &ECDSA_P256_SHA256_FIXED_SIGNING
                } else {
                    &ECDSA_P384_SHA384_FIXED_SIGNING
                };
                let pair = EcdsaKeyPair::generate(curve).expect("key");
                EncodingKey::from_ec_der(pair.to_pkcs8v1().expect("pkcs8").as_ref())
            }
            Algorithm::EdDsa => {
                let pair = Ed25519KeyPair::generate().expect("key");
                EncodingKey::from_ed_der(pair.to_pkcs8v1().expect("pkcs8").as_ref())
            }
            _ => {
                let pair = RsaKeyPair::generate(KeySize::Rsa2048).expect("key");
                let der: aws_lc_rs::encoding::Pkcs8V1Der<'_> = pair.as_der().expect("pkcs8");
                // The library requires the PKCS#1 key that PKCS#8 wraps in 26 bytes: version, algorithm,
                // octet string.
                EncodingKey::from_rsa_der(&der.as_ref()[26..])
            }
        };
        Self { algorithm, key }
    }

    fn jwk(&self, id: Option<&str>) -> Value {
        let mut jwk = Jwk::from_encoding_key(&self.key, self.algorithm.to_library()).expect("jwk");
        jwk.common.key_id = id.map(str::to_owned);
        jwk.common.key_algorithm = None;
        serde_json::to_value(jwk).expect("json")
    }

    fn sign(&self, id: Option<&str>, claims: &Value) -> String {
        let mut header = Header::new(self.algorithm.to_library());
        header.kid = id.map(str::to_owned);
        encode(&header, claims, &self.key).expect("signed")
    }
}

fn config() -> JwtConfig {
    JwtConfig {
        issuers: vec!["https://id.example".to_owned()],
        audiences: vec!["kvasir".to_owned()],
        algorithms: Algorithm::ALL.to_vec(),
        leeway: Duration::from_secs(30),
        prefix: String::new(),
        claims: ClaimNames::default(),
        default_tenant: None,
        default_models: Models::from_names(["small"]),
        default_priority: 1,
        priorities: (0, 9),
        weight: 2,
        limits: LimitConfig { requests_per_minute: Some(60), ..LimitConfig::default() },
        tenant_limits: LimitConfig::default(),
    }
}

fn verifier(config: JwtConfig, keys: &[Value]) -> JwtVerifier {
    let verifier = JwtVerifier::new(config).expect("good");
    let keys = json!({ "keys": keys }).to_string();
    assert!(verifier.set_keys(Jwks::parse(keys.as_bytes()).expect("keys")));
    assert!(!verifier.set_keys(Jwks::parse(keys.as_bytes()).expect("keys")));
    verifier
}

fn claims() -> Value {
    json!({"iss": "https://id.example", "aud": "kvasir", "sub": "ann", "tenant": "acme", "exp": NOW + 60})
}

fn with(changes: Value) -> Value {
    let mut claims = claims();
    for (name, value) in changes.as_object().expect("an object") {
        claims[name] = value.clone();
    }
    claims.as_object_mut().expect("an object").retain(|_, value| value != "absent");
    claims
}

#[test]
fn every_allowed_algorithm_verifies_and_a_changed_token_does_not() {
    let mut rsa = Signer::new(Algorithm::Rs256);
    for algorithm in Algorithm::ALL {
        let fresh;
        let signer = match algorithm {
            Algorithm::Es256 | Algorithm::Es384 | Algorithm::EdDsa => {
                fresh = Signer::new(algorithm);
                &fresh
            }
            _ => {
                // One key for all RSA algorithms: generating one takes a second.
                rsa.algorithm = algorithm;
                &rsa
            }
        };
        let verifier = verifier(config(), &[signer.jwk(Some("k"))]);
        let token = signer.sign(Some("k"), &claims());
        assert!(matches!(verifier.verify(&token, NOW), TokenVerdict::Valid(_)), "{algorithm:?}");
        let mut changed: Vec<&str> = token.split('.').collect();
        let payload = URL_SAFE_NO_PAD.encode(with(json!({"tenant": "other"})).to_string());
        changed[1] = &payload;
        let verdict = verifier.verify(&changed.join("."), NOW);
        assert_eq!(verdict, TokenVerdict::Refused(TokenProblem::Signature), "{algorithm:?}");
        let others = config().algorithms.into_iter().filter(|&other| other != algorithm).collect();
        let narrow = self::verifier(JwtConfig { algorithms: others, ..config() }, &[signer.jwk(Some("k"))]);
        assert_eq!(
            narrow.verify(&token, NOW),
            TokenVerdict::Refused(TokenProblem::Algorithm),
            "{algorithm:?}"
        );
    }
}

#[test]
fn claims_become_a_grant() {
    let signer = Signer::new(Algorithm::EdDsa);
    let verifier = verifier(config(), &[signer.jwk(Some("k"))]);
    let claims = with(json!({"models": "a b*", "priority": -5, "aud": ["other", "kvasir"]}));
    let TokenVerdict::Valid(grant) = verifier.verify(&signer.sign(Some("k"), &claims), NOW) else {
        panic!("good")
    };
    assert_eq!((&*grant.name, &*grant.tenant, grant.is_admin), ("ann", "acme", false));
    assert_eq!((grant.priority, grant.weight, grant.expires), (0, 2, Some(NOW + 90)));
    assert!(grant.models.allows("b1") && !grant.models.allows("small"));
    assert_eq!(grant.limits.requests_per_minute, Some(60));
    let TokenVerdict::Valid(grant) = verifier.verify(&signer.sign(Some("k"), &self::claims()), NOW) else {
        panic!("good")
    };
    assert_eq!((grant.priority, grant.models), (1, Models::from_names(["small"])));
    let apart = JwtConfig { prefix: "okta/".to_owned(), ..config() };
    let apart = self::verifier(apart, &[signer.jwk(Some("k"))]);
    let TokenVerdict::Valid(grant) = apart.verify(&signer.sign(Some("k"), &self::claims()), NOW) else {
        panic!("good")
    };
    assert_eq!((&*grant.name, &*grant.tenant, grant.scope), ("okta/ann", "okta/acme", Scope::Subject));
}

#[test]
fn bad_claims_are_refused() {
    let signer = Signer::new(Algorithm::EdDsa);
    let verifier = verifier(config(), &[signer.jwk(Some("k"))]);
    let cases = [
        (json!({"exp": NOW - 30}), TokenProblem::Expired),
        (json!({"exp": "absent"}), TokenProblem::Expired),
        (json!({"exp": "soon"}), TokenProblem::Expired),
        (json!({"nbf": NOW + 31}), TokenProblem::NotYet),
        (json!({"nbf": "later"}), TokenProblem::Claim("nbf")),
        (json!({"iss": "https://evil.example"}), TokenProblem::Issuer),
        (json!({"iss": ["https://id.example", "https://evil.example"]}), TokenProblem::Issuer),
        (json!({"iss": "absent"}), TokenProblem::Issuer),
        (json!({"aud": "other"}), TokenProblem::Audience),
        (json!({"aud": []}), TokenProblem::Audience),
        (json!({"aud": "absent"}), TokenProblem::Audience),
        (json!({"sub": "absent"}), TokenProblem::Claim("name")),
        (json!({"tenant": "absent"}), TokenProblem::Claim("tenant")),
        (json!({"tenant": "a\nb"}), TokenProblem::Claim("tenant")),
        (json!({"models": 1}), TokenProblem::Claim("models")),
        (json!({"priority": "high"}), TokenProblem::Claim("priority")),
    ];
    for (changes, problem) in cases {
        let token = signer.sign(Some("k"), &with(changes.clone()));
        assert_eq!(verifier.verify(&token, NOW), TokenVerdict::Refused(problem), "{changes}");
    }
    for good in [json!({"exp": NOW - 29}), json!({"nbf": NOW + 30}), json!({"exp": NOW as f64 + 0.5})] {
        let token = signer.sign(Some("k"), &with(good.clone()));
        assert!(matches!(verifier.verify(&token, NOW), TokenVerdict::Valid(_)), "{good}");
    }
}

#[test]
fn an_unknown_key_is_no_verdict() {
    let (signer, stranger) = (Signer::new(Algorithm::EdDsa), Signer::new(Algorithm::EdDsa));
    let verifier = verifier(config(), &[signer.jwk(Some("k"))]);
    assert_eq!(verifier.verify(&signer.sign(Some("new"), &claims()), NOW), TokenVerdict::UnknownKey);
    let verdict = verifier.verify(&stranger.sign(Some("k"), &claims()), NOW);
    assert_eq!(verdict, TokenVerdict::Refused(TokenProblem::Signature));
    assert!(
        matches!(verifier.verify(&signer.sign(None, &claims()), NOW), TokenVerdict::Valid(_)),
        "the only one"
    );
    let two = self::verifier(config(), &[signer.jwk(Some("k")), stranger.jwk(Some("l"))]);
    assert_eq!(two.verify(&signer.sign(None, &claims()), NOW), TokenVerdict::Refused(TokenProblem::NoKeyId));
    let empty = JwtVerifier::new(config()).expect("good");
    assert_eq!(empty.verify(&signer.sign(Some("k"), &claims()), NOW), TokenVerdict::UnknownKey);
}

#[test]
fn tokens_do_not_choose_how_they_are_checked() {
    let signer = Signer::new(Algorithm::EdDsa);
    let jwk = signer.jwk(Some("k"));
    let verifier = verifier(config(), std::slice::from_ref(&jwk));
    let payload = URL_SAFE_NO_PAD.encode(claims().to_string());
    let forged = |header: Value, signature: &str| {
        format!("{}.{payload}.{signature}", URL_SAFE_NO_PAD.encode(header.to_string()))
    };
    // The public key as the secret of a symmetric signature: the attack of RFC 8725, section 2.1.
    let public = URL_SAFE_NO_PAD.decode(jwk["x"].as_str().expect("x")).expect("base64");
    let mut header = Header::new(jsonwebtoken::Algorithm::HS256);
    header.kid = Some("k".to_owned());
    let symmetric = encode(&header, &claims(), &EncodingKey::from_secret(&public)).expect("signed");
    let mut header = Header::new(jsonwebtoken::Algorithm::EdDSA);
    (header.kid, header.crit) = (Some("k".to_owned()), Some(vec!["b64".to_owned()]));
    let critical = encode(&header, &claims(), &signer.key).expect("signed");
    let long = format!("{}.{}.x", "a".repeat(9000), "b".repeat(9000));
    let cases = [
        (symmetric, TokenProblem::Algorithm),
        (critical, TokenProblem::Critical),
        (forged(json!({"alg": "none", "kid": "k"}), ""), TokenProblem::Malformed),
        (forged(json!({"alg": "PS512", "kid": "k"}), "AAAA"), TokenProblem::Algorithm),
        (forged(json!({"alg": "EdDSA", "kid": "k"}), ""), TokenProblem::Signature),
        (forged(json!({"alg": "EdDSA", "kid": "k", "jwk": jwk}), "AAAA"), TokenProblem::Signature),
        (long, TokenProblem::Malformed),
        ("a.b".to_owned(), TokenProblem::Malformed),
        (String::new(), TokenProblem::Malformed),
    ];
    for (token, problem) in cases {
        assert_eq!(verifier.verify(&token, NOW), TokenVerdict::Refused(problem), "{token}");
    }
    assert_eq!(
        verifier.verify(&forged(json!({"alg": "RS256", "kid": "k"}), "AAAA"), NOW),
        TokenVerdict::UnknownKey
    );
}

#[test]
fn names_of_algorithms() {
    for algorithm in Algorithm::ALL {
        assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        assert_eq!(Algorithm::from_library(algorithm.to_library()), Some(algorithm));
    }
    for name in ["none", "None", "HS256", "HS384", "HS512", "PS384", "rs256", ""] {
        assert_eq!(Algorithm::from_name(name), None, "{name}");
    }
}

#[test]
fn a_bad_configuration_is_refused_with_all_its_problems() {
    let bad = JwtConfig { issuers: Vec::new(), audiences: Vec::new(), weight: 0, ..config() };
    let error = JwtVerifier::new(bad).expect_err("bad").to_string();
    assert!(["issuer", "audience", "weight"].iter().all(|word| error.contains(word)), "{error}");
}
