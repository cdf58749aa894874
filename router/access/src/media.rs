//! Policy for images, sounds and videos that a request may make an engine fetch.
//!
//! An engine fetches the URLs of a request from inside the cluster, beside metadata services and the other
//! workers. Programs parse some URLs differently, so only unambiguous ones are accepted: no user
//! information, no blanks, backslashes or control characters, host names in plain ASCII, addresses in their
//! usual notation. Names are not resolved: a public name may lead to a private address, and a server may
//! redirect to one. Protection against that is a list of hosts, and a network in which engines reach no
//! more than they must.
//!
//! Pure functions over texts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Last labels of names that are only defined within a host or a network.
const PRIVATE_ENDS: [&str; 8] =
    ["localhost", "localdomain", "local", "internal", "intranet", "lan", "svc", "home.arpa"];

/// Restrictions on media of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaPolicy {
    /// Accepted schemes of URLs.
    pub schemes: Vec<String>,
    /// Accepted hosts: names, addresses, `*.example.com` for all names below a name, `*`. Empty: every
    /// public host. A host that is listed itself may be private.
    pub hosts: Vec<String>,
    /// Whether hosts may be private.
    pub private_hosts: bool,
    /// Largest number of media in a request.
    pub count_max: usize,
    /// Largest size of a medium that is embedded in the request, in bytes as written there.
    pub data_bytes_max: usize,
}

impl Default for MediaPolicy {
    fn default() -> Self {
        Self {
            schemes: ["https", "http", "data"].map(str::to_owned).to_vec(),
            hosts: Vec::new(),
            private_hosts: false,
            count_max: 64,
            data_bytes_max: 16 << 20,
        }
    }
}

impl MediaPolicy {
    /// Checks whether a URL may be given to an engine; the error is a predicate that follows the field's
    /// name.
    ///
    /// # Errors
    ///
    /// The reason, without the URL.
    pub fn check(&self, url: &str) -> Result<(), String> {
        let no_url = || "is not a URL with an unambiguous host".to_owned();
        let (scheme, rest) = url.split_once(':').ok_or_else(no_url)?;
        let is = |other: &str| scheme.eq_ignore_ascii_case(other);
        if !self.schemes.iter().any(|allowed| is(allowed)) {
            return Err(format!("has a scheme other than {}", self.schemes.join(", ")));
        }
        if is("data") {
            return self.check_data(url.len());
        }
        if !is("http") && !is("https") {
            return Ok(());
        }
        let host = Host::of(rest).ok_or_else(no_url)?;
        if self.hosts.iter().any(|listed| host.is(listed)) {
            return Ok(());
        }
        if !self.hosts.is_empty() && !self.hosts.iter().any(|listed| host.is_below(listed)) {
            return Err("names a host that is not among those allowed here".to_owned());
        }
        if !self.private_hosts && !host.is_public() {
            return Err("names a host that is not public".to_owned());
        }
        Ok(())
    }

    /// Checks whether data of this size may be embedded in a request.
    ///
    /// # Errors
    ///
    /// The reason.
    pub fn check_data(&self, bytes: usize) -> Result<(), String> {
        match bytes > self.data_bytes_max {
            true => Err(format!("has {bytes} bytes, more than {}", self.data_bytes_max)),
            false => Ok(()),
        }
    }
}

/// The host of a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Host<'a> {
    Address(IpAddr),
    /// Labels of ASCII letters, digits, `-` and `_`, without a dot at the end.
    Name(&'a str),
}

impl<'a> Host<'a> {
    /// Parses the host of a URL behind the scheme; `None` for every form that programs could parse
    /// differently.
    fn of(rest: &'a str) -> Option<Self> {
        let rest = rest.strip_prefix("//")?;
        if rest.bytes().any(|byte| byte <= b' ' || matches!(byte, b'\\' | 0x7f)) {
            return None;
        }
        let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
        let (host, port) = match authority.strip_prefix('[') {
            Some(inner) => {
                let (address, port) = inner.split_once(']')?;
                (Self::Address(IpAddr::V6(address.parse().ok()?)), port)
            }
            None => {
                let end = authority.find(':').unwrap_or(authority.len());
                (Self::named(&authority[..end])?, &authority[end..])
            }
        };
        let is_number = |digits: &str| {
            (1..=5).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
        };
        (port.is_empty() || port.strip_prefix(':').is_some_and(is_number)).then_some(host)
    }

    fn named(text: &'a str) -> Option<Self> {
        let name = text.strip_suffix('.').unwrap_or(text);
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if !name.split('.').all(|label| !label.is_empty() && label.bytes().all(is_plain)) {
            return None;
        }
        let last = name.rsplit('.').next().unwrap_or(name);
        if !last.starts_with(|letter: char| letter.is_ascii_digit()) {
            return Some(Self::Name(name));
        }
        // No name ends in a number. Other programs read an address of fewer parts, in octal or in
        // hexadecimal as another address.
        Some(Self::Address(IpAddr::V4(name.parse().ok()?)))
    }

    /// Whether the host equals a listed host.
    fn is(&self, listed: &str) -> bool {
        match self {
            Self::Name(name) => name.eq_ignore_ascii_case(listed.trim_end_matches('.')),
            Self::Address(address) => {
                let listed = listed.trim_start_matches('[').trim_end_matches(']');
                listed.parse::<IpAddr>().is_ok_and(|listed| listed == *address)
            }
        }
    }

    /// Whether the host matches a listed pattern.
    fn is_below(&self, listed: &str) -> bool {
        match (listed.strip_prefix('*'), self) {
            (Some(""), _) => true,
            (Some(end), Self::Name(name)) => end.starts_with('.') && ends_with(name, end),
            _ => false,
        }
    }

    fn is_public(&self) -> bool {
        match self {
            Self::Address(IpAddr::V4(address)) => is_public_v4(*address),
            Self::Address(IpAddr::V6(address)) => is_public_v6(*address),
            // A single label is resolved by the search list of the host's resolver.
            Self::Name(name) => {
                let is_private =
                    |end: &&str| ends_with(name, end) && name[..name.len() - end.len()].ends_with('.');
                name.contains('.') && !PRIVATE_ENDS.iter().any(is_private)
            }
        }
    }
}

/// Whether a host's name ends in `end`, and is longer.
fn ends_with(name: &str, end: &str) -> bool {
    let at = name.len().saturating_sub(end.len());
    at > 0 && name.as_bytes()[at..].eq_ignore_ascii_case(end.as_bytes())
}

/// Whether an address is public by IANA's registry of special-purpose addresses; Azure's address for its
/// own services is not.
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, d] = address.octets();
    let is_special = matches!(
        (a, b, c),
        (0 | 10 | 127 | 224..=255, _, _)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 168, _)
            | (192, 0, 0 | 2)
            | (192, 88, 99)
            | (198, 18 | 19, _)
            | (198, 51, 100)
            | (203, 0, 113)
    );
    !is_special && [a, b, c, d] != [168, 63, 129, 16]
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    match address.segments() {
        // An IPv4 address inside: compatible, mapped, NAT64 and 6to4.
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, _, _, _, _, _] => {
            is_public_v4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)))
        }
        // For protocols (2001::/23, Teredo among them) and for documentation.
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        // Global unicast. Everything else is local, multicast or unassigned.
        [first, ..] => (0x2000..0x4000).contains(&first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_hosts_are_refused_in_every_spelling() {
        let policy = MediaPolicy::default();
        for host in [
            "127.0.0.1",
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "017700000001",
            "127.0.0.1.",
            "127.000.000.001",
            "0",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:a00:1]",
            "[::127.0.0.1]",
            "[fe80::1]",
            "[fe80::1%25eth0]",
            "[fc00::1]",
            "[fd00:ec2::254]",
            "[ff02::1]",
            "[64:ff9b::7f00:1]",
            "[64:ff9b:1::1]",
            "[2002:a00:1::]",
            "[2001:db8::1]",
            "[2001::1]",
            "[::1",
            "::1",
            "localhost",
            "LOCALHOST.",
            "a.localhost",
            "engine",
            "redis:6379",
            "a.b.svc",
            "a.b.svc.cluster.local",
            "metadata.google.internal",
            "x.LOCAL",
            "127.0.0.1:80:90",
            "127.0.0.1:x",
            "user@127.0.0.1",
            "example.com@127.0.0.1",
            "example.com:80@127.0.0.1",
            "127.0.0.1%2f",
            "%31%32%37.0.0.1",
            "\u{2460}27.0.0.1",
            "127\u{3002}0\u{3002}0\u{3002}1",
            "loc\u{ad}alhost",
            "a..b.com",
            ".example.com",
            "",
            "example.com\\@127.0.0.1",
            "example.com\t.evil",
            " example.com",
            "ex ample.com",
            "127.0.0.1:",
        ] {
            for scheme in ["http", "HTTPS"] {
                for tail in ["/x", "", "?q", "#f"] {
                    let url = format!("{scheme}://{host}{tail}");
                    assert!(policy.check(&url).is_err(), "{url}");
                }
            }
        }
        for url in [
            "",
            "x",
            "/etc/passwd",
            "cat.png",
            "file:///etc/passwd",
            "ftp://example.com",
            "http:example.com",
            "http:/x",
        ] {
            assert!(policy.check(url).is_err(), "{url}");
        }
        for url in [
            "https://example.com",
            "http://example.com:8080/a?b=@c#d",
            "HTTPS://EXAMPLE.com./",
            "https://8.8.8.8/x",
            "https://[2606:4700::1111]:443/x",
            "https://[::ffff:8.8.8.8]/",
            "https://notlocal.com",
            "https://xn--bcher-kva.example",
            "https://example.com/ü",
            "data:image/png;base64,AA==",
            "DATA:,x",
            "https://172.32.0.1",
            "https://mylocalhost.com",
        ] {
            assert_eq!(policy.check(url), Ok(()), "{url}");
        }
    }

    #[test]
    fn a_list_of_hosts_is_all_that_is_let_through() {
        let hosts =
            ["cdn.example.com", "*.images.example", "10.0.0.5", "[fd00::1]"].map(str::to_owned).to_vec();
        let policy = MediaPolicy {
            hosts,
            data_bytes_max: 20,
            schemes: vec!["https".to_owned(), "data".to_owned()],
            ..MediaPolicy::default()
        };
        for good in [
            "https://CDN.example.com/a",
            "https://a.images.example",
            "https://a.b.images.example:1/",
            "https://10.0.0.5/x",
            "https://[fd00:0::1]/",
            "data:,0123456789abcd",
        ] {
            assert_eq!(policy.check(good), Ok(()), "{good}");
        }
        for bad in [
            "https://example.com",
            "https://images.example",
            "https://evilimages.example",
            "https://10.0.0.6",
            "https://cdn.example.com.evil.com",
            "http://cdn.example.com",
            "data:,0123456789abcdef",
        ] {
            assert!(policy.check(bad).is_err(), "{bad}");
        }
        let any = MediaPolicy { private_hosts: true, ..MediaPolicy::default() };
        assert_eq!(any.check("http://localhost:1/"), Ok(()));
        assert!(any.check("http://0x7f.1/").is_err(), "nobody knows which host that is");
    }
}
