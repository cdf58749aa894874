//! Parser of the few fields of an X.509 certificate that rustls does not provide: the subject's common
//! name, the DNS names and URIs among the alternative names, and the end of validity (RFC 5280, section
//! 4.1).
//!
//! The certificate was verified before, or is the operator's own: the parser must not panic on any bytes,
//! and must return a name either whole or not at all. All DER tags that are read have one byte.

const INTEGER: u8 = 0x02;
const OCTET_STRING: u8 = 0x04;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const BOOLEAN: u8 = 0x01;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
/// `version [0]` and `extensions [3]` of TBSCertificate, both explicit.
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
/// `dNSName [2]` and `uniformResourceIdentifier [6]` of GeneralName, both implicit.
const DNS_NAME: u8 = 0x82;
const URI: u8 = 0x86;
/// 2.5.4.3, id-at-commonName.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// 2.5.29.17, id-ce-subjectAltName.
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// Names and validity of a certificate.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Fields {
    /// The last common name of the subject, which is the most specific.
    pub(crate) common_name: Option<String>,
    pub(crate) dns_names: Vec<String>,
    pub(crate) uris: Vec<String>,
    /// notAfter in seconds since 1970; 0 when that is earlier.
    pub(crate) expires_unix: u64,
}

/// Parses a certificate in DER form; `None` when the bytes are not one.
pub(crate) fn parse(certificate: &[u8]) -> Option<Fields> {
    let mut outer = Reader(Reader(certificate).take(SEQUENCE)?);
    let mut signed = Reader(outer.take(SEQUENCE)?);
    if signed.next_is(VERSION) {
        signed.take(VERSION)?;
    }
    signed.take(INTEGER)?;
    let _algorithm = signed.take(SEQUENCE)?;
    let _issuer = signed.take(SEQUENCE)?;
    let mut validity = Reader(signed.take(SEQUENCE)?);
    let _not_before = validity.any()?;
    let (form, not_after) = validity.any()?;
    let mut fields = Fields { expires_unix: unix_time(form, not_after)?, ..Fields::default() };
    fields.common_name = common_name(signed.take(SEQUENCE)?)?;
    let _public_key = signed.take(SEQUENCE)?;
    while !signed.0.is_empty() {
        let (tag, contents) = signed.any()?;
        if tag == EXTENSIONS {
            extensions(contents, &mut fields)?;
        }
    }
    Some(fields)
}

fn common_name(subject: &[u8]) -> Option<Option<String>> {
    let mut found = None;
    let mut names = Reader(subject);
    while !names.0.is_empty() {
        let mut set = Reader(names.take(SET)?);
        while !set.0.is_empty() {
            let mut attribute = Reader(set.take(SEQUENCE)?);
            let kind = attribute.take(OBJECT_IDENTIFIER)?;
            let (form, value) = attribute.any()?;
            if kind == COMMON_NAME && matches!(form, UTF8_STRING | PRINTABLE_STRING | IA5_STRING) {
                found = std::str::from_utf8(value).ok().filter(|name| !name.contains(char::is_control));
            }
        }
    }
    Some(found.map(str::to_owned))
}

fn extensions(contents: &[u8], fields: &mut Fields) -> Option<()> {
    let mut list = Reader(Reader(contents).take(SEQUENCE)?);
    while !list.0.is_empty() {
        let mut extension = Reader(list.take(SEQUENCE)?);
        let kind = extension.take(OBJECT_IDENTIFIER)?;
        if extension.next_is(BOOLEAN) {
            extension.take(BOOLEAN)?;
        }
        let value = extension.take(OCTET_STRING)?;
        if kind == SUBJECT_ALT_NAME {
            let mut names = Reader(Reader(value).take(SEQUENCE)?);
            while !names.0.is_empty() {
                let (tag, name) = names.any()?;
                // Both are IA5 strings. A name with a space or a zero byte in it is ignored.
                let name = std::str::from_utf8(name)
                    .ok()
                    .filter(|name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic()));
                match (tag, name) {
                    (DNS_NAME, Some(name)) => fields.dns_names.push(name.to_owned()),
                    (URI, Some(name)) => fields.uris.push(name.to_owned()),
                    _ => {}
                }
            }
        }
    }
    Some(())
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`, the only forms that RFC 5280 allows.
fn unix_time(form: u8, text: &[u8]) -> Option<u64> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |part: &[u8]| {
        part.iter().try_fold(0_i64, |number, byte| {
            byte.is_ascii_digit().then(|| number * 10 + i64::from(byte - b'0'))
        })
    };
    let (year, rest) = match (form, digits.len()) {
        (UTC_TIME, 12) => {
            let year = number(&digits[..2])?;
            (if year < 50 { 2000 + year } else { 1900 + year }, &digits[2..])
        }
        (GENERALIZED_TIME, 14) => (number(&digits[..4])?, &digits[4..]),
        _ => return None,
    };
    let (month, day) = (number(&rest[..2])?, number(&rest[2..4])?);
    let (hour, minute, second) = (number(&rest[4..6])?, number(&rest[6..8])?, number(&rest[8..10])?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Days since 1970 in the proleptic Gregorian calendar, with years that begin in March so that a leap day is the
    // last day of its year (Hinnant, "chrono-compatible low-level date algorithms", days_from_civil).
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let year_of_era = year.rem_euclid(400);
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    Some(u64::try_from(days * 86_400 + hour * 3600 + minute * 60 + second).unwrap_or(0))
}

/// The bytes that remain to be read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn next_is(&self, tag: u8) -> bool {
        self.0.first() == Some(&tag)
    }

    /// Returns the contents of the next element, if it has this tag.
    fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        if !self.next_is(tag) {
            return None;
        }
        self.any().map(|(_, contents)| contents)
    }

    /// Returns the next element's tag and contents. Lengths are definite, and of at most four bytes.
    fn any(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, mut rest) = rest.split_first()?;
        let mut length = usize::from(first & 0x7f);
        if first & 0x80 != 0 {
            if !(1..=4).contains(&length) {
                return None;
            }
            let (bytes, after) = rest.split_at_checked(length)?;
            length = bytes.iter().fold(0, |length, &byte| length << 8 | usize::from(byte));
            rest = after;
        }
        let (contents, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, contents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType, date_time_ymd};

    fn certificate() -> Vec<u8> {
        let mut parameters =
            CertificateParams::new(["a.example".to_owned(), "10.0.0.1".to_owned()]).expect("names");
        parameters
            .subject_alt_names
            .push(SanType::URI("spiffe://example/ns/a/sa/b".try_into().expect("ASCII")));
        parameters.distinguished_name.push(DnType::OrganizationName, "Acme");
        parameters.distinguished_name.push(DnType::CommonName, "worker ü");
        parameters.not_after = date_time_ymd(2031, 2, 28) + std::time::Duration::from_secs(86_399);
        let key = KeyPair::generate().expect("key");
        parameters.self_signed(&key).expect("certificate").der().to_vec()
    }

    #[test]
    fn the_fields_of_a_certificate_are_read() {
        let expected = Fields {
            common_name: Some("worker ü".to_owned()),
            dns_names: vec!["a.example".to_owned()],
            uris: vec!["spiffe://example/ns/a/sa/b".to_owned()],
            // date -u -d '2031-02-28 23:59:59' +%s
            expires_unix: 1_930_089_599,
        };
        assert_eq!(parse(&certificate()), Some(expected));
    }

    #[test]
    fn times_are_read() {
        // Each by `date -u -d '...' +%s`.
        let cases: [(u8, &[u8], Option<u64>); 12] = [
            (UTC_TIME, b"700101000000Z", Some(0)),
            (UTC_TIME, b"000229120000Z", Some(951_825_600)),
            (UTC_TIME, b"491231235959Z", Some(2_524_607_999)),
            (UTC_TIME, b"500101000000Z", Some(0)),
            (GENERALIZED_TIME, b"20500101000000Z", Some(2_524_608_000)),
            (GENERALIZED_TIME, b"21000301000000Z", Some(4_107_542_400)),
            (GENERALIZED_TIME, b"99991231235959Z", Some(253_402_300_799)),
            (GENERALIZED_TIME, b"20501301000000Z", None),
            (GENERALIZED_TIME, b"2050010100000Z", None),
            (UTC_TIME, b"491231235959", None),
            (UTC_TIME, b"4912312359+9Z", None),
            (INTEGER, b"491231235959Z", None),
        ];
        for (form, text, expected) in cases {
            assert_eq!(unix_time(form, text), expected, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn no_bytes_lead_to_a_panic_and_none_cut_short_are_taken() {
        let good = certificate();
        for length in 0..good.len() {
            assert_eq!(parse(&good[..length]), None, "cut to {length}");
        }
        let mut refused = 0;
        for at in 0..good.len() {
            for value in [0, 1, 0x30, 0x7f, 0x80, 0x84, 0xff, good[at] ^ 1] {
                let mut bad = good.clone();
                bad[at] = value;
                refused += u32::from(parse(&bad).is_none());
            }
        }
        assert!(refused > 100, "{refused} refused");
    }

    #[test]
    fn a_name_with_a_zero_byte_is_dropped() {
        let mut bytes = certificate();
        let at = bytes.windows(9).position(|window| window == b"a.example").expect("the name");
        bytes[at + 1] = 0;
        let fields = parse(&bytes).expect("still a certificate");
        assert!(fields.dns_names.is_empty(), "{fields:?}");
        assert_eq!(fields.uris.len(), 1);
    }
}
