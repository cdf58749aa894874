//! Execution of work requests on a software device.

use super::world::{Receive, Request, World, strikes};
use crate::ffi::{self, ScatterGatherEntry, WorkCompletion};

/// Result of executing one request.
enum Outcome {
    Done,
    /// The peer has no receive posted; the request is retried later.
    Blocked,
    /// The request fails with this status; if `peer_fails`, the peer's pair fails as well.
    Failed {
        status: u32,
        peer_fails: bool,
    },
}

const fn failed(status: u32) -> Outcome {
    Outcome::Failed { status, peer_fails: false }
}

impl World {
    /// Executes the pair's queued requests in order until one is blocked or held back.
    pub(super) fn progress(&mut self, number: u32) {
        loop {
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            let (context, state) = (pair.context, pair.state);
            let Some(request) = pair.queue.pop_front() else { return };
            if state == ffi::QPS_ERR {
                self.finish(number, &request, ffi::WC_WR_FLUSH_ERR);
                continue;
            }
            if self.device_of_context(context).is_some_and(|device| device.is_holding) {
                self.put_back(number, request);
                return;
            }
            match self.execute(number, &request) {
                Outcome::Done => self.finish(number, &request, ffi::WC_SUCCESS),
                Outcome::Blocked => {
                    self.put_back(number, request);
                    if !self.blocked.contains(&number) {
                        self.blocked.push(number);
                    }
                    return;
                }
                Outcome::Failed { status, peer_fails } => {
                    self.finish(number, &request, status);
                    let destination = self.pairs.get(&number).map_or(0, |pair| pair.destination);
                    self.fail(number);
                    if peer_fails {
                        let peer = self.pairs.get(&destination).map(|peer| (peer.context, peer.raw));
                        if let Some((context, raw)) = peer {
                            self.raise(context, raw, ffi::EVENT_QP_ACCESS_ERR);
                        }
                        self.fail(destination);
                    }
                }
            }
        }
    }

    /// Retries the requests that waited for a receive.
    pub(super) fn progress_blocked(&mut self) {
        for _ in 0..self.blocked.len() {
            let number = self.blocked.remove(0);
            self.progress(number);
        }
    }

    fn put_back(&mut self, number: u32, request: Request) {
        if let Some(pair) = self.pairs.get_mut(&number) {
            pair.queue.push_front(request);
        }
    }

    /// Moves a pair to its error state and flushes it.
    pub(super) fn fail(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        if pair.state == ffi::QPS_ERR {
            return;
        }
        pair.state = ffi::QPS_ERR;
        let (context, raw) = (pair.context, pair.raw);
        self.raise(context, raw, ffi::EVENT_QP_LAST_WQE_REACHED);
        self.progress(number);
    }

    fn finish(&mut self, number: u32, request: &Request, status: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.since_completion += 1;
        if status == ffi::WC_SUCCESS && !request.is_signalled {
            return;
        }
        let frees = std::mem::take(&mut pair.since_completion);
        let opcode = match request.opcode {
            ffi::WR_SEND => ffi::WC_SEND,
            ffi::WR_RDMA_READ => ffi::WC_RDMA_READ,
            _ => ffi::WC_RDMA_WRITE,
        };
        let completion = WorkCompletion {
            id: request.id,
            status,
            opcode,
            queue_pair_number: number,
            ..Default::default()
        };
        let queue = pair.completions;
        self.complete(queue, completion, frees);
    }

    fn region_covers(&self, key: u32, domain: u32, address: u64, length: u64, remote: u32) -> bool {
        self.regions.get(&key).is_some_and(|region| {
            let offset = address.checked_sub(region.address);
            let end = offset.and_then(|offset| offset.checked_add(length));
            region.domain == domain
                && region.remote & remote == remote
                && end.is_some_and(|end| end <= region.length)
        })
    }

    fn execute(&mut self, number: u32, request: &Request) -> Outcome {
        let Some(pair) = self.pairs.get(&number) else { return failed(ffi::WC_LOC_QP_OP_ERR) };
        let (partition, context, domain, destination, psns, retry) = (
            pair.partition,
            pair.context,
            pair.domain,
            pair.destination,
            (pair.send_psn, pair.receive_psn),
            pair.receiver_not_ready_retry,
        );
        let cut = match self.device_of_context(context) {
            Some(device) => {
                let mut left = device.faults.completion_fails_after.map(|(left, _)| left);
                let strikes = strikes(&mut left);
                if let (Some(fault), Some(left)) = (&mut device.faults.completion_fails_after, left) {
                    fault.0 = left;
                }
                if let (true, Some((_, status))) = (strikes, device.faults.completion_fails_after) {
                    return failed(status);
                }
                device.is_cut
            }
            None => true,
        };
        let entries = &request.entries[..request.entry_count];
        let total: u64 = if request.is_inline {
            request.inline_bytes as u64
        } else {
            let covered = entries.iter().all(|entry| {
                self.region_covers(entry.local_key, domain, entry.address, entry.length.into(), 0)
            });
            if !covered {
                return failed(ffi::WC_LOC_PROT_ERR);
            }
            entries.iter().map(|entry| u64::from(entry.length)).sum()
        };
        let Some(peer) = self.pairs.get(&destination) else { return failed(ffi::WC_RETRY_EXC_ERR) };
        let (peer_context, peer_domain) = (peer.context, peer.domain);
        let (peer_receives, peer_completions) = (peer.receives, peer.completions);
        let answers = matches!(peer.state, ffi::QPS_RTR | ffi::QPS_RTS) && peer.destination == number;
        // A packet of another partition is dropped without an answer.
        let in_step = peer.receive_psn == psns.0 && peer.partition == partition;
        let peer_cut = self.device_of_context(peer_context).is_none_or(|device| device.is_cut);
        if !answers || !in_step || cut || peer_cut {
            return failed(ffi::WC_RETRY_EXC_ERR);
        }
        let is_send = request.opcode == ffi::WR_SEND;
        let needed = match request.opcode {
            ffi::WR_RDMA_READ => ffi::ACCESS_REMOTE_READ,
            _ => ffi::ACCESS_REMOTE_WRITE,
        };
        if !is_send
            && total > 0
            && !self.region_covers(request.remote_key, peer_domain, request.remote_address, total, needed)
        {
            return Outcome::Failed { status: ffi::WC_REM_ACCESS_ERR, peer_fails: true };
        }
        let mut receive = None;
        if is_send || request.opcode == ffi::WR_RDMA_WRITE_WITH_IMM {
            receive = self.receives.get_mut(&peer_receives).and_then(|queue| queue.posted.pop_front());
            if receive.is_none() {
                return if retry == 7 { Outcome::Blocked } else { failed(ffi::WC_RNR_RETRY_EXC_ERR) };
            }
        }
        let mut target = request.remote_address;
        if let (true, Some(Receive { id, entry })) = (is_send, &receive) {
            let fits = total <= u64::from(entry.length)
                && self.region_covers(entry.local_key, peer_domain, entry.address, total, 0);
            if !fits {
                let completion = WorkCompletion {
                    id: *id,
                    status: ffi::WC_LOC_LEN_ERR,
                    queue_pair_number: destination,
                    ..Default::default()
                };
                self.complete(peer_completions, completion, 0);
                return Outcome::Failed { status: ffi::WC_REM_INV_REQ_ERR, peer_fails: true };
            }
            target = entry.address;
        }
        self.move_bytes(request, target);
        if let Some(Receive { id, .. }) = receive {
            let (opcode, immediate, flags) = if is_send {
                (ffi::WC_RECV, 0, 0)
            } else {
                (ffi::WC_RECV_RDMA_WITH_IMM, request.immediate, ffi::WC_WITH_IMM)
            };
            let completion = WorkCompletion {
                id,
                opcode,
                immediate,
                flags,
                byte_count: total as u32,
                queue_pair_number: destination,
                ..Default::default()
            };
            self.complete(peer_completions, completion, 0);
        }
        Outcome::Done
    }

    /// The device's access to memory: copies local ranges to or from `target`; all ranges were checked.
    fn move_bytes(&self, request: &Request, mut target: u64) {
        if request.is_inline {
            let bytes = &request.inline[..request.inline_bytes];
            // SAFETY: the caller checked that a region covers the target; a region's memory is mapped as long as
            // it is registered, which the world's lock holds still; `bytes` are our own.
            unsafe { self.copy_bytes(bytes.as_ptr() as u64, target, bytes.len()) };
            return;
        }
        for &ScatterGatherEntry { address, length, .. } in &request.entries[..request.entry_count] {
            let is_read = request.opcode == ffi::WR_RDMA_READ;
            let (from, to) = if is_read { (target, address) } else { (address, target) };
            // SAFETY: the caller checked that regions cover both ranges; their memory is mapped as long as they
            // are registered, which the world's lock holds still.
            unsafe { self.copy_bytes(from, to, length as usize) };
            target += u64::from(length);
        }
    }
}
