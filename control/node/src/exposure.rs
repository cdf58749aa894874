//! Start-up warnings of a role that other machines can reach and that requires no key. One line for each
//! subject; none if all listeners are on loopback.

use std::net::{IpAddr, SocketAddr};

use control_config::Settings;
use router_engines::dialect::host_of;

use crate::admin::AdminAddress;
use crate::compose;

fn is_beyond_loopback(address: &SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

/// Returns the warning of a gateway that listens on this address.
pub(crate) fn of_gateway(settings: &Settings, listen: SocketAddr) -> Option<String> {
    let asks_certificate = settings.tls.client_certificate == "required";
    let grpc = settings.gateway.grpc_listen.parse().ok();
    // The picker requires certificates only with the gateway's own TLS.
    let picker = settings.picker.listen.parse().ok();
    let picker = picker.filter(|_| !(asks_certificate && settings.picker.tls == "gateway"));
    let clients = [Some(listen), grpc].into_iter().flatten().filter(|_| !asks_certificate);
    let open: Vec<String> =
        clients.chain(picker).filter(is_beyond_loopback).map(|address| address.to_string()).collect();
    if compose::is_closed(settings) || open.is_empty() {
        return None;
    }
    Some(format!(
        "the gateway listens on {} and asks for no key: whoever reaches it may use the models; set `access.keys_file`, \
         `access.token_issuer` or `tls.client_certificate = \"required\"` (which protects the picker with \
         `picker.tls = \"gateway\"` only)",
        open.join(" and ")
    ))
}

/// Returns the warning of a control service.
pub(crate) fn of_control(settings: &Settings) -> Option<String> {
    let has_keda = settings.planner.mode == "act" && settings.planner.actuator == "keda";
    let keda = settings.control.keda_listen.parse().ok().filter(|_| has_keda);
    let open: Vec<String> = [settings.control.listen.parse().ok(), keda]
        .into_iter()
        .flatten()
        .filter(is_beyond_loopback)
        .map(|address: SocketAddr| address.to_string())
        .collect();
    (!open.is_empty()).then(|| {
        format!(
            "the control service listens on {} and asks for no key: whoever reaches it sees how many workers there are and \
             should be, and nothing can be changed there",
            open.join(" and ")
        )
    })
}

/// Returns the warning of a gateway without keys that has an administrators' listener.
pub(crate) fn of_admin(settings: &Settings, place: Option<&AdminAddress>) -> Option<String> {
    let address = place?.address().filter(is_beyond_loopback)?;
    (!compose::is_closed(settings)).then(|| {
        format!(
            "`gateway.admin_listen` is {address} and asks for no key: whoever reaches it sees metrics and decisions; set \
             `access.keys_file`"
        )
    })
}

/// Returns the warning of a gateway with peers and without their shared key.
pub(crate) fn of_peers(settings: &Settings, has_key: bool) -> Option<String> {
    let is_local = |peer: &String| {
        let host = host_of(peer);
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    };
    let far = settings.gateway.peers.iter().find(|peer| !is_local(peer)).filter(|_| !has_key)?;
    Some(format!(
        "`gateway.peers` names {far}, and there is no key: gateways of other machines are not believed; set {} to the same \
         text on all of them",
        compose::PEER_KEY
    ))
}

/// Returns the warning of a worker that listens on this address; none with a key or client certificates.
pub(crate) fn of_worker(settings: &Settings, listen: SocketAddr, has_key: bool) -> Option<String> {
    let worker = &settings.worker;
    let mut said = Vec::new();
    if is_beyond_loopback(&listen) && !has_key && worker.client_ca_file.is_empty() {
        said.push(format!(
            "the worker listens on {listen} and asks for no key: whoever reaches it may use it past the gateway's keys and \
             limits; set `worker.api_key_file`"
        ));
    }
    let events = [worker.events, worker.replay];
    if worker.event_tokens && events.iter().any(is_beyond_loopback) {
        said.push(format!(
            "whoever reaches its KV events on {} reads every prompt, and there is no key for them; set \
             `worker.event_tokens = false`",
            worker.events.ip()
        ));
    }
    (!said.is_empty()).then(|| said.join("; "))
}

/// Returns the warning of a process with its own transports; a shared secret keeps out unknown peers.
pub(crate) fn of_transfer(settings: &Settings, listen: SocketAddr, has_secret: bool) -> Option<String> {
    let open: Vec<String> = [listen, settings.rdma.listen]
        .iter()
        .filter(|address| is_beyond_loopback(address) && !has_secret)
        .map(ToString::to_string)
        .collect();
    (!open.is_empty()).then(|| {
        format!(
            "blocks are moved on {} and there is no secret: whoever reaches it writes into this process's KV memory; set \
             `transfer.secret_file`",
            open.join(" and ")
        )
    })
}

/// Returns the warning of a store. The Redis protocol is not included: beyond loopback it does not start
/// without a password.
pub(crate) fn of_store(settings: &Settings, has_secret: bool) -> Option<String> {
    let store = &settings.store;
    let mut said = Vec::new();
    let pool = [store.listen, settings.rdma.listen];
    let open: Vec<String> =
        pool.iter().filter(|address| is_beyond_loopback(address)).map(ToString::to_string).collect();
    if store.pool.0 > 0 && !open.is_empty() && !has_secret {
        said.push(format!(
            "whoever reaches the pool on {} may read and write it without a secret; set `transfer.secret_file`",
            open.join(" and ")
        ));
    }
    if is_beyond_loopback(&store.http) {
        said.push(format!(
            "{} shows its metrics and the names of its blocks to everybody (`store.http`)",
            store.http
        ));
    }
    (!said.is_empty()).then(|| said.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Settings {
        control_config::parse(text).expect(text)
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_role_that_is_open_beyond_loopback_names_the_key_to_set() {
        let gateway = |text: &str, listen: &str| of_gateway(&settings(text), at(listen));
        for (text, listen) in [
            ("", "127.0.0.1:8000"),
            ("", "[::1]:8000"),
            ("", "[::ffff:127.0.0.1]:8000"),
            ("[access]\nkeys_file = \"keys.toml\"\n", "0.0.0.0:8000"),
            ("[access]\ntoken_issuer = \"https://id\"\n", "0.0.0.0:8000"),
            ("[tls]\nclient_certificate = \"required\"\n", "0.0.0.0:8000"),
        ] {
            assert_eq!(gateway(text, listen), None, "{text} {listen}");
        }
        for listen in ["0.0.0.0:8000", "[::]:8000", "10.0.0.1:8000"] {
            let said = gateway("", listen).expect("said");
            assert!(said.contains(listen) && said.contains("access.keys_file"), "{said}");
        }
        let said = gateway("[gateway]\ngrpc_listen = \"0.0.0.0:8001\"\n", "127.0.0.1:8000").expect("said");
        assert!(said.contains("on 0.0.0.0:8001 and asks"), "{said}");

        let picker = |tls: &str| {
            let text = format!(
                "[tls]\nclient_certificate = \"required\"\n[picker]\nlisten = \"0.0.0.0:9002\"\ntls = \"{tls}\"\n"
            );
            gateway(&text, "0.0.0.0:8000")
        };
        assert_eq!(picker("gateway"), None);
        for tls in ["off", "self-signed"] {
            let said = picker(tls).expect("said");
            assert!(said.contains("on 0.0.0.0:9002 and asks"), "{said}");
        }

        let control = |text: &str| of_control(&settings(text));
        assert_eq!(control(""), None);
        assert_eq!(control("[control]\nkeda_listen = \"0.0.0.0:8091\"\n"), None, "nothing listens there");
        let said = control("[control]\nlisten = \"0.0.0.0:8090\"\n").expect("said");
        assert!(said.contains("on 0.0.0.0:8090"), "{said}");
        let keda =
            "[control]\nkeda_listen = \"0.0.0.0:8091\"\n[planner]\nmode = \"act\"\nactuator = \"keda\"\n";
        assert!(control(keda).expect("said").contains("on 0.0.0.0:8091"));

        let admin =
            |text: &str, address: &str| of_admin(&settings(text), Some(&AdminAddress::Tcp(at(address))));
        assert_eq!(of_admin(&Settings::default(), None), None);
        assert_eq!(of_admin(&Settings::default(), Some(&AdminAddress::Unix("/run/k.sock".into()))), None);
        assert_eq!(admin("", "127.0.0.1:9090"), None);
        assert_eq!(admin("[access]\nkeys_file = \"keys.toml\"\n", "0.0.0.0:9090"), None);
        assert!(admin("", "0.0.0.0:9090").expect("said").contains("access.keys_file"));

        let peers =
            |text: &str, has_key| of_peers(&settings(&format!("[gateway]\npeers = {text}\n")), has_key);
        assert_eq!(peers("[]", false), None);
        assert_eq!(
            peers("[\"http://127.0.0.1:1\", \"http://[::1]:2\", \"http://localhost:3\"]", false),
            None
        );
        assert_eq!(peers("[\"http://b:1\"]", true), None);
        let said = peers("[\"http://127.0.0.1:1\", \"http://b:1\"]", false).expect("said");
        assert!(said.contains("http://b:1") && said.contains("KVASIR_PEER_KEY"), "{said}");

        let worker = |text: &str, listen: &str, has_key| of_worker(&settings(text), at(listen), has_key);
        assert_eq!(worker("", "127.0.0.1:1", false), None);
        assert_eq!(worker("", "0.0.0.0:1", true), None);
        assert_eq!(worker("[worker]\nclient_ca_file = \"ca.pem\"\n", "0.0.0.0:1", false), None);
        assert_eq!(worker("[worker]\nevents = \"0.0.0.0:5557\"\n", "127.0.0.1:1", false), None);
        assert!(worker("", "0.0.0.0:1", false).expect("said").contains("worker.api_key_file"));
        let text = "[worker]\nevents = \"0.0.0.0:5557\"\nevent_tokens = true\n";
        assert!(worker(text, "127.0.0.1:1", true).expect("said").contains("worker.event_tokens"));

        let transfer =
            |text: &str, listen: &str, has_secret| of_transfer(&settings(text), at(listen), has_secret);
        assert_eq!(transfer("", "127.0.0.1:1", false), None);
        assert_eq!(transfer("[rdma]\nlisten = \"10.0.0.1:7\"\n", "10.0.0.1:1", true), None);
        let said = transfer("[rdma]\nlisten = \"10.0.0.1:7\"\n", "10.0.0.1:1", false).expect("said");
        assert!(
            said.contains("10.0.0.1:1 and 10.0.0.1:7") && said.contains("transfer.secret_file"),
            "{said}"
        );

        assert_eq!(of_store(&Settings::default(), false), None);
        let said =
            of_store(&settings("[store]\nlisten = \"0.0.0.0:7400\"\nhttp = \"0.0.0.0:7401\"\n"), false);
        let said = said.expect("said");
        assert!(said.contains("transfer.secret_file") && said.contains("store.http"), "{said}");
        let no_pool = "[store]\npool = \"0 B\"\nlisten = \"0.0.0.0:7400\"\n";
        assert_eq!(of_store(&settings(no_pool), false), None);
        assert_eq!(of_store(&settings("[store]\nlisten = \"0.0.0.0:7400\"\n"), true), None);
    }
}
