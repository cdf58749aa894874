//! Tests of the keys file.

use super::*;

const HEX: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

#[test]
fn every_field_is_read() {
    let text = format!(
        "[[tenant]]\nname='acme'\ntokens_per_minute=1_000\n[[key]]\nname='app'\ntenant='acme'\nsha256='{HEX}'\n\
         admin=true\nmodels=['a','b*']\nrequests_per_minute=60\ntokens_per_minute=0x10\nconcurrent_max=3\n\
         priority=-2\nweight=5\nexpires=2027-01-01T00:00:00Z\n[[key]]\nname='b'\ntenant='other'\nsha256='{}'\n",
        "0".repeat(64)
    );
    let keys = parse(&text).expect("good");
    let grant = keys.find("abc", 0).expect("found");
    assert_eq!((&*grant.name, &*grant.tenant, grant.is_admin), ("app", "acme", true));
    assert!(grant.models.allows("b2") && !grant.models.allows("c"));
    let limits =
        LimitConfig { requests_per_minute: Some(60), tokens_per_minute: Some(16), concurrent_max: Some(3) };
    assert_eq!(grant.limits, limits);
    assert_eq!(grant.tenant_limits.tokens_per_minute, Some(1000));
    assert_eq!((grant.priority, grant.weight, grant.expires), (-2, 5, Some(1_798_761_600)));
    let plain = &keys.grants[&[0; 32]];
    assert_eq!((plain.priority, plain.weight, plain.expires, plain.is_admin), (0, 1, None, false));
    assert_eq!((plain.models.clone(), plain.limits), (Models::All, LimitConfig::default()));
}

#[test]
fn all_problems_are_listed_with_their_lines() {
    let text = format!(
        "[[key]]\nname = 'a'\ntenant = 'kvasir-secret'\nsha256 = 'kvasir-secret'\n\
         [[key]]\nname = 'b'\nweight = 0\ncolour = 'red'\n\
         [[key]]\nname = ''\ntenant = 't'\nsha256 = '{HEX}'\nexpires = '2027-01-01'\nmodels = 'a'\n\
         [[key]]\nname = 'c'\ntenant = 't'\nsha256 = '{HEX}'\n\
         [[key]]\nname = 'c'\ntenant = 't'\nsha256 = '{HEX}'\nadmin = 1\npriority = 1.5\n\
         [table]\n"
    );
    let problems = parse(&text).expect_err("bad");
    let lines: Vec<usize> = problems.0.iter().map(|problem| problem.line).collect();
    assert_eq!(lines, [4, 5, 5, 7, 8, 10, 13, 14, 19, 19, 23, 24, 25], "{problems}");
    assert!(!problems.to_string().contains("secret"), "{problems}");
}

#[test]
fn syntax_errors_have_lines_and_no_text_is_a_panic() {
    let problems = parse("[[key]]\nname = \n\ntenant = 'a\n").expect_err("bad");
    assert!(problems.0.iter().any(|problem| problem.line == 2), "{problems}");
    let good = format!(
        "[[key]]\nname='a'\ntenant='t'\nsha256='{HEX}'\nmodels=['x']\nexpires='2027-01-01T00:00:00Z'\n"
    );
    for end in 0..good.len() {
        let _ = parse(&good[..end]);
    }
    assert!(parse("key = 1").is_err());
    assert!(parse("key = [1]").is_err());
    assert!(parse("[key]").is_err());
}

#[test]
fn certificates_are_found_by_the_names_in_them() {
    let text = "[[tenant]]\nname='acme'\ntokens_per_minute=1000\n\
        [[certificate]]\nname='batch'\nidentity='uri:spiffe://house/batch'\ntenant='acme'\nmodels=['a']\n\
        [[certificate]]\nname='ops'\nidentity='dns:ops.house'\ntenant='house'\nadmin=true\n\
        [[certificate]]\nname='old'\nidentity='cn:client 7'\ntenant='acme'\nexpires='1970-01-01T00:01:40Z'\n";
    let keys = parse(text).expect("good");
    assert_eq!((keys.len(), keys.is_empty()), (3, false));
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let find = |uris: &[&str], dns_names: &[&str], common_name, now| {
        let found = keys.find_certificate(&owned(uris), &owned(dns_names), common_name, now);
        found.map(|grant| (&*grant.name, &*grant.tenant, grant.is_admin))
    };
    assert_eq!(find(&["spiffe://house/batch"], &[], None, 0), Some(("batch", "acme", false)));
    assert_eq!(find(&[], &["x.house", "ops.house"], Some("other"), 0), Some(("ops", "house", true)));
    assert_eq!(find(&[], &[], Some("client 7"), 99), Some(("old", "acme", false)));
    assert_eq!(find(&[], &[], Some("client 7"), 100), None, "it has expired");
    let both = find(&["spiffe://house/batch"], &["ops.house"], None, 0);
    assert_eq!(both, Some(("batch", "acme", false)), "a URI counts before a DNS name");
    // A name only matches in its own field of the certificate.
    assert_eq!(find(&["ops.house"], &["spiffe://house/batch", "client 7"], Some("ops.house"), 0), None);
    let grant = keys.find_certificate(&owned(&["spiffe://house/batch"]), &[], None, 0).expect("found");
    assert_eq!(grant.tenant_limits.tokens_per_minute, Some(1000));
    assert!(grant.models.allows("a") && !grant.models.allows("b"));

    for (text, line) in [
        ("[[certificate]]\nname='a'\ntenant='t'\n", 1),
        ("[[certificate]]\nname='a'\ntenant='t'\nidentity='ops.house'\n", 4),
        ("[[certificate]]\nname='a'\ntenant='t'\nidentity='email:a@b'\n", 4),
        ("[[certificate]]\nname='a'\ntenant='t'\nidentity='dns:'\n", 4),
        ("[[certificate]]\nname='a'\ntenant='t'\nidentity='cn:x'\nsha256='y'\n", 5),
    ] {
        let problems = parse(text).expect_err(text);
        assert_eq!(problems.0.iter().map(|problem| problem.line).collect::<Vec<_>>(), [line], "{text}");
    }
    let twice = "[[certificate]]\nname='a'\ntenant='t'\nidentity='cn:x'\n\
        [[certificate]]\nname='b'\ntenant='t'\nidentity='cn:x'\n";
    assert_eq!(parse(twice).expect_err("twice").0.len(), 1);
}
