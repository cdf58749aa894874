//! The end of connections, after which no write of the peer can arrive, and the device events that cause it.
//!
//! An end has three steps. [`VerbsFabric::start_teardown`] closes the TCP connection, which tells the peer, and
//! has both queue pairs moved to their error state: when that is done ([`VerbsFabric::stopped`]), the
//! device sends nothing for them and accepts nothing from the peer. It returns the work in flight as
//! flushed. When all of it is back, or the drain timeout has passed, [`VerbsFabric::destroy_pairs`] has the
//! pairs destroyed. [`VerbsFabric::finish_teardown`] reports `PeerDown`: the slots that the peer was told of can
//! be reused then. A connection that ends while its pairs are being made waits for them first
//! (`commands.rs`).
//!
//! A device may refuse both the error state and the destruction of a pair. The state of such a pair is
//! unknown: the memory that its requests name is never freed, and `PeerDown` is never reported, so that
//! slots that its peer may write are not reused.

use std::time::Instant;

use dataplane_fabric::Event;
use dataplane_fabric::handshake::SocketId;

use crate::commands::Command;
use crate::connection::Phase;
use crate::fabric::{Route, VerbsFabric};
use crate::ffi;
use crate::lane::{Lane, Pair};
use crate::numbers::NumberMap;

impl VerbsFabric {
    /// Starts the end of a connection. `PeerDown` follows from a later poll.
    pub(crate) fn start_teardown(&mut self, number: u64, reason: &str) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.phase.is_end() {
            return;
        }
        if connection.phase == Phase::Established {
            self.establishing += 1;
        } else {
            self.metrics.handshakes_failed += 1;
        }
        connection.phase = Phase::Draining;
        self.polls_until_control = 0;
        connection.reason = format!("{reason} (peer {})", connection.address);
        connection.ended_at = Instant::now();
        connection.deadline = Some(connection.ended_at + self.local.config.drain_timeout);
        self.handshakes.close(SocketId(number));
        if connection.is_in_command() {
            connection.abandoned.set();
        } else {
            self.stop_pairs(number);
        }
    }

    /// Submits the command that stops a connection's pairs.
    pub(crate) fn stop_pairs(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        self.polls_until_control = 0;
        let has_work = |lane: &Lane| !matches!(lane.pair, Pair::Absent | Pair::Leaked);
        if !connection.lanes.iter().any(has_work) {
            // A connection without pairs has no receives to wait for.
            connection.receives_returned = [true; 2];
            return;
        }
        let pairs = connection.lanes.each_mut().map(Lane::take_for_command);
        self.submit(number, Command::Stop(pairs));
    }

    /// Handles a finished stop: the device ended the pairs' work, or refused and destroyed them, or keeps them.
    pub(crate) fn stopped(&mut self, number: u64, pairs: [Pair; 2], errors: &[String]) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        for (lane, pair) in connection.lanes.iter_mut().zip(pairs) {
            lane.pair = pair;
            if matches!(lane.pair, Pair::Absent) {
                forget_pair(&mut self.routes, lane, number);
            }
        }
        for error in errors {
            tracing::warn!(error, "a queue pair did not go to its error state");
        }
        connection.ended_at = Instant::now();
        connection.deadline = Some(connection.ended_at + self.local.config.drain_timeout);
        self.polls_until_control = 0;
    }

    /// Submits the destruction of a connection's pairs when the device has no work left for them; the end
    /// is reported after it.
    pub(crate) fn destroy_pairs(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let pairs = connection.lanes.each_mut().map(Lane::take_failed);
        if pairs.iter().all(Option::is_none) {
            return self.finish_teardown(number);
        }
        connection.phase = Phase::Destroying;
        self.submit(number, Command::Destroy(pairs));
    }

    /// Handles a finished destruction: the device destroyed the pairs, or keeps them.
    pub(crate) fn destroyed(&mut self, number: u64, is_destroyed: [bool; 2]) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        for (lane, is_gone) in connection.lanes.iter_mut().zip(is_destroyed) {
            if lane.is_in_command() {
                lane.pair = if is_gone { Pair::Absent } else { Pair::Leaked };
            }
        }
        self.finish_teardown(number);
    }

    /// Reports the end of a connection without pairs.
    pub(crate) fn finish_teardown(&mut self, number: u64) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        self.establishing -= 1;
        let leaked = connection.lanes.iter().filter(|lane| lane.is_leaked()).count();
        self.metrics.queue_pairs_leaked += leaked as u64;
        for lane in &mut connection.lanes {
            let lost = lane.give_up(&mut self.local.bounce.free, &mut self.events);
            self.metrics.outstanding -= lost;
            forget_pair(&mut self.routes, lane, number);
        }
        let reason = std::mem::take(&mut connection.reason);
        if leaked > 0 {
            let device = self.local.device.name();
            tracing::error!(
                device,
                reason,
                "the device does not destroy a queue pair: its peer may still write, so the slots that it was shown are lost"
            );
        } else if connection.is_announced {
            self.events.push_back(Event::PeerDown { peer: connection.peer, reason });
        } else {
            tracing::info!(reason, "an RDMA handshake failed");
        }
    }

    /// Handles a panic of the command thread. The state of the pairs that it held is unknown.
    pub(crate) fn handle_command_thread_panic(&mut self) {
        let lost: Vec<u64> = (self.connections.iter())
            .filter(|(_, connection)| connection.is_in_command())
            .map(|(&number, _)| number)
            .collect();
        for &number in &lost {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            for lane in connection.lanes.iter_mut().filter(|lane| lane.is_in_command()) {
                lane.pair = Pair::Leaked;
            }
        }
        self.end_all("the thread that makes and destroys queue pairs panicked");
        lost.into_iter().for_each(|number| self.finish_teardown(number));
    }

    /// Ends all connections: the device or a queue that all connections share has failed.
    pub(crate) fn end_all(&mut self, reason: &str) {
        if self.fatal.is_none() {
            tracing::error!(reason, "the RDMA device failed: all connections and the listener are closed");
            self.fatal = Some(reason.to_owned());
            self.handshakes.stop_listening();
        }
        let numbers: Vec<u64> = self.connections.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.start_teardown(number, reason));
    }

    /// Handles a work request that failed.
    pub(crate) fn send_failed(&mut self, peer: u64, completion: &ffi::WorkCompletion) {
        match completion.status {
            ffi::WC_SUCCESS | ffi::WC_WR_FLUSH_ERR => {}
            ffi::WC_RETRY_EXC_ERR => self.metrics.retries_exceeded += 1,
            ffi::WC_RNR_RETRY_EXC_ERR => self.metrics.receiver_not_ready += 1,
            ffi::WC_REM_ACCESS_ERR => self.metrics.remote_access_errors += 1,
            _ => {}
        }
        let device = &self.local.device;
        let text = device.library().status_text(completion.status);
        let (name, vendor) = (device.name(), completion.vendor_error);
        self.start_teardown(peer, &format!("work completion on {name}: {text}, vendor error {vendor:#x}"));
    }

    /// Handles the asynchronous events of the device.
    pub(crate) fn take_async_events(&mut self) {
        while let Some(event) = self.local.device.next_async_event() {
            let text = self.local.device.library().event_text(event.kind);
            match event.kind {
                ffi::EVENT_QP_FATAL | ffi::EVENT_QP_REQ_ERR | ffi::EVENT_QP_ACCESS_ERR => {
                    let element = event.element.cast_const();
                    let hit = self.connections.iter().find_map(|(&number, connection)| {
                        connection.lanes.iter().any(|lane| lane.is_pair(element)).then_some(number)
                    });
                    if let Some(number) = hit {
                        self.start_teardown(number, &format!("asynchronous event: {text}"));
                    }
                }
                ffi::EVENT_CQ_ERR | ffi::EVENT_DEVICE_FATAL | ffi::EVENT_SRQ_ERR => {
                    let device = self.local.device.name();
                    let reason = format!("asynchronous event on {device}: {text}");
                    self.end_all(&reason);
                }
                ffi::EVENT_QP_LAST_WQE_REACHED => {
                    let element = event.element.cast_const();
                    for connection in self.connections.values_mut() {
                        for (lane, returned) in connection.lanes.iter().zip(&mut connection.receives_returned)
                        {
                            *returned |= lane.is_pair(element);
                        }
                    }
                    self.polls_until_control = 0;
                }
                ffi::EVENT_PORT_ACTIVE
                | ffi::EVENT_PORT_ERR
                | ffi::EVENT_LID_CHANGE
                | ffi::EVENT_PKEY_CHANGE
                | ffi::EVENT_CLIENT_REREGISTER
                | ffi::EVENT_GID_CHANGE => {
                    // A link that comes back in time costs retries only; the retry timeout decides. New
                    // connections use the port's addresses as they are now.
                    self.metrics.port_events += 1;
                    self.local.refresh_port();
                    tracing::warn!(device = self.local.device.name(), event = text, "RDMA port");
                }
                _ => tracing::debug!(device = self.local.device.name(), event = text, "RDMA event"),
            }
        }
    }
}

/// Removes a destroyed pair's route and identity: its number and its address may belong to another pair already.
pub(crate) fn forget_pair(routes: &mut NumberMap<u32, Route>, lane: &mut Lane, connection: u64) {
    let is_ours = |route: &Route| route.peer == connection;
    if let Some(pair) = lane.take_identity().filter(|pair| routes.get(pair).is_some_and(is_ours)) {
        routes.remove(&pair);
    }
}

impl Drop for VerbsFabric {
    /// Destroys the pairs first: after that the device accesses no local memory, and everything else can be
    /// freed.
    fn drop(&mut self) {
        self.commands.end();
        self.take_outcomes();
        let numbers: Vec<u64> = self.connections.keys().copied().collect();
        for &number in &numbers {
            self.start_teardown(number, "the node is going down");
        }
        self.take_outcomes();
        for &number in &numbers {
            self.destroy_pairs(number);
        }
        self.take_outcomes();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use dataplane_fabric::Fabric;
    use dataplane_fabric::testing::pool;

    use super::*;
    use crate::VerbsConfig;
    use crate::commands::CommandThread;
    use crate::testing::SoftwareDevice;

    /// The state of the pairs that the thread held is unknown: their slots are never freed, and every
    /// connection ends.
    #[test]
    fn a_thread_of_commands_that_panics_ends_all_and_is_told() {
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let fabric = |listen| {
            let device = SoftwareDevice::new().open().expect("open");
            VerbsFabric::new(device, pool("panics").slab(), listen, VerbsConfig::default()).expect("a fabric")
        };
        let (mut a, mut b) = (fabric(None), fabric(listen));
        let address = b.listening_on().expect("listening").to_string();
        let peers = [(); 2].map(|()| a.connect(&address).expect("connect starts"));
        let (mut seen, started) = (Vec::new(), Instant::now());
        while seen.len() < 2 {
            a.poll(64, &mut seen);
            b.poll(64, &mut Vec::new());
            assert!(started.elapsed() < Duration::from_secs(20), "{seen:?}");
        }
        seen.clear();
        a.commands = CommandThread::start_with("panics", |_| panic!("as this test wants")).expect("a thread");
        a.disconnect(peers[0]);
        while a.fatal.is_none() {
            a.take_outcomes();
            assert!(started.elapsed() < Duration::from_secs(20), "its death is not noticed");
        }
        assert_eq!((a.connection_count(), a.metrics().queue_pairs_leaked), (1, 2));
        while a.connection_count() > 0 {
            a.take_outcomes();
            a.poll(64, &mut seen);
            assert!(started.elapsed() < Duration::from_secs(20), "the other connection stays");
        }
        assert!(matches!(&seen[..], [Event::PeerDown { peer, .. }] if *peer == peers[1]), "{seen:?}");
        assert!(a.connect(&address).is_err());
    }
}
