//! Polls the gateway, on a thread of its own, over one connection that is kept open.
//!
//! Each answer and each failure becomes one [`Message`]. The channel is bounded: while the terminal does not take
//! messages, polling pauses. Dropping the receiver or the sender of [`PauseSwitch`] ends the thread.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use router_tls::ClientStream;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::config::Target;
use crate::error::TopError;
use crate::wire::{Decisions, Samples, Status, clean};

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Largest answer; a status has about 700 bytes per worker.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Messages that may wait to be shown.
const MESSAGES_MAX: usize = 4;

const STATUS: &str = "/kvasir/status";
const DECISIONS: &str = "/kvasir/decisions";
const HISTORY: &str = "/kvasir/history";

/// Message to the terminal's thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// The gateway answered.
    Answer(Box<Answer>),
    /// The poll failed.
    Failed(TopError),
    /// The process received SIGTERM, SIGHUP or SIGINT.
    Stop,
}

/// Answers of one poll.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: Status,
    /// Decisions after those of earlier answers. A failure here does not invalidate the status.
    pub(crate) decisions: Result<Decisions, TopError>,
    /// Whether the gateway has restarted: decisions of earlier answers are of an earlier run.
    pub(crate) is_new_run: bool,
    /// The gateway's samples from before this answer: with the first answer of each run of the gateway; empty otherwise, and
    /// when the gateway has none.
    pub(crate) samples: Vec<Status>,
}

/// Switch that pauses polling. Dropping the sender ends the thread.
pub(crate) type PauseSwitch = watch::Sender<IsPaused>;
pub(crate) type IsPaused = bool;

/// Starts the thread. With `is_interactive` the first answer has the gateway's samples, and SIGTERM, SIGHUP and SIGINT
/// become [`Message::Stop`] from here on; they then no longer end the process by themselves.
pub(crate) fn start(
    target: Target,
    is_interactive: bool,
) -> Result<(Receiver<Message>, PauseSwitch), TopError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(TopError::Poller)?;
    let guard = runtime.enter();
    let signals = is_interactive.then(Signals::listen).transpose().map_err(TopError::Poller)?;
    drop(guard);
    let (sender, receiver) = sync_channel(MESSAGES_MAX);
    let (pause, paused) = watch::channel(false);
    let work = async move {
        let Some(mut signals) = signals else { return poll(target, false, &sender, paused).await };
        tokio::select! {
            () = poll(target, true, &sender, paused) => {}
            () = signals.heard() => {
                let _ = sender.send(Message::Stop);
            }
        }
    };
    let thread = std::thread::Builder::new().name("top-poll".to_owned());
    thread.spawn(move || runtime.block_on(work)).map_err(TopError::Poller)?;
    Ok((receiver, pause))
}

struct Signals([Signal; 3]);

impl Signals {
    fn listen() -> io::Result<Self> {
        let kinds = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()];
        let [terminate, hang_up, interrupt] = kinds.map(signal);
        Ok(Self([terminate?, hang_up?, interrupt?]))
    }

    async fn heard(&mut self) {
        let [terminate, hang_up, interrupt] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}

async fn poll(
    target: Target,
    is_interactive: bool,
    sender: &SyncSender<Message>,
    mut paused: watch::Receiver<IsPaused>,
) {
    let interval = target.interval;
    let mut gateway =
        Gateway { target, is_interactive, connection: None, started_unix: 0, last_decision: None };
    loop {
        if paused.wait_for(|is_paused| !is_paused).await.is_err() {
            return;
        }
        let begun = Instant::now();
        let message = match gateway.poll().await {
            Ok(answer) => Message::Answer(Box::new(answer)),
            Err(error) => Message::Failed(error),
        };
        if !deliver(sender, message).await {
            return;
        }
        let next = sleep_until((begun + interval).max(Instant::now() + interval / 10));
        tokio::pin!(next);
        loop {
            tokio::select! {
                () = &mut next => break,
                changed = paused.changed() => if changed.is_err() { return },
            }
        }
    }
}

/// Waits for room in the channel; the runtime continues meanwhile, so that signals are handled. False: the receiver is gone.
async fn deliver(sender: &SyncSender<Message>, mut message: Message) -> bool {
    use std::sync::mpsc::TrySendError;
    loop {
        match sender.try_send(message) {
            Ok(()) => return true,
            Err(TrySendError::Disconnected(_)) => return false,
            Err(TrySendError::Full(back)) => message = back,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

struct Gateway {
    target: Target,
    is_interactive: bool,
    connection: Option<SendRequest<Empty<Bytes>>>,
    started_unix: u64,
    /// Sequence number of the newest received decision.
    last_decision: Option<u64>,
}

impl Gateway {
    async fn poll(&mut self) -> Result<Answer, TopError> {
        let status: Status = self.ask(STATUS, "").await?;
        let mut is_new_run = status.started_unix != self.started_unix;
        if is_new_run {
            self.started_unix = status.started_unix;
            self.last_decision = None;
        }
        let query = self.last_decision.map(|last| format!("?after={last}")).unwrap_or_default();
        let decisions = self.ask::<Decisions>(DECISIONS, &query).await;
        match decisions.as_ref().map(|decisions| decisions.last) {
            // The gateway counts from the beginning again: the next poll requests all decisions.
            Ok(last) if last.is_some() && last < self.last_decision => {
                is_new_run = true;
                self.last_decision = None;
            }
            Ok(last) => self.last_decision = last.or(self.last_decision),
            Err(_) => {}
        }
        let samples = match is_new_run && self.is_interactive {
            // Without samples the series begins now.
            true => self.ask::<Samples>(HISTORY, "").await.unwrap_or_default().samples,
            false => Vec::new(),
        };
        Ok(Answer { status, decisions, is_new_run, samples })
    }

    async fn ask<T: DeserializeOwned>(&mut self, path: &'static str, query: &str) -> Result<T, TopError> {
        let body = self.get(path, query).await?;
        serde_json::from_slice(&body)
            .map_err(|error| TopError::NotUnderstood { path, reason: clean(&error.to_string()) })
    }

    /// Returns the body of a 200. If a kept connection was closed by the other side, the request is sent once more.
    async fn get(&mut self, path: &'static str, query: &str) -> Result<Bytes, TopError> {
        let was_kept = self.connection.is_some();
        let answer = match self.get_within(path, query).await {
            Err(TopError::Connection { .. }) if was_kept => self.get_within(path, query).await,
            answer => answer,
        };
        let (status, body) = answer?;
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(TopError::Refused { status, had_key: self.target.authorization.is_some() })
            }
            status => Err(TopError::Status { path, status, message: message_of(&body) }),
        }
    }

    async fn get_within(&mut self, path: &'static str, query: &str) -> Result<(StatusCode, Bytes), TopError> {
        let connection = match self.connection.take().filter(|kept| !kept.is_closed()) {
            Some(kept) => kept,
            None => connect(&self.target).await?,
        };
        match timeout(ANSWER_WITHIN, exchange(connection, &self.target, path, query)).await {
            Ok(Ok((connection, status, body))) => {
                self.connection = Some(connection);
                Ok((status, body))
            }
            Ok(Err(reason)) => Err(broken(&self.target, reason)),
            Err(_) => Err(broken(&self.target, format!("no answer within {ANSWER_WITHIN:?}"))),
        }
    }
}

fn broken(target: &Target, reason: impl ToString) -> TopError {
    TopError::Connection { gateway: target.authority.clone(), reason: clean(&reason.to_string()) }
}

/// Connects to the gateway, over TLS if its URL is `https`.
async fn connect(target: &Target) -> Result<SendRequest<Empty<Bytes>>, TopError> {
    let socket = timeout(CONNECT_WITHIN, TcpStream::connect((target.host.as_str(), target.port))).await;
    let socket = socket
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no connection within two seconds"))
        .flatten()
        .map_err(|error| broken(target, error))?;
    socket.set_nodelay(true).map_err(|error| broken(target, error))?;
    let stream = match &target.tls {
        None => ClientStream::Plain(socket),
        Some(tls) => {
            let connected = tls.connect(&target.host, socket).await;
            connected.map_err(|error| broken(target, io::Error::other(error)))?
        }
    };
    let (sender, connection) =
        handshake(TokioIo::new(stream)).await.map_err(|error| broken(target, error))?;
    // The task ends with the sender; an error of the connection is returned by the request that it fails.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(sender)
}

type Exchanged = (SendRequest<Empty<Bytes>>, StatusCode, Bytes);

async fn exchange(
    mut connection: SendRequest<Empty<Bytes>>,
    target: &Target,
    path: &str,
    query: &str,
) -> Result<Exchanged, String> {
    connection.ready().await.map_err(|error| error.to_string())?;
    let mut request = Request::get(format!("{}{path}{query}", target.prefix))
        .header(header::HOST, &target.authority)
        .header(header::ACCEPT, "application/json");
    if let Some(authorization) = &target.authorization {
        request = request.header(header::AUTHORIZATION, authorization);
    }
    let request = request.body(Empty::new()).map_err(|error| error.to_string())?;
    let response = connection.send_request(request).await.map_err(|error| error.to_string())?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    Ok((connection, status, body.map_err(|error| error.to_string())?.to_bytes()))
}

/// Error message of a refusal.
fn message_of(body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    clean(body["error"]["message"].as_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::TopConfig;
    use crate::display::View;

    /// A gateway that answers one request per connection, restarts before its third status, and returns samples if `has_history`.
    /// The requested paths are sent through the channel.
    fn gateway(has_history: bool) -> (String, std::sync::mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        let (sender, asked) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut statuses = 0;
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let mut head = String::new();
                let mut reader = BufReader::new(&stream);
                while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).is_ok_and(|count| count > 0)
                {
                }
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                statuses += usize::from(path == STATUS);
                let started = if statuses < 3 { 100 } else { 200 };
                let (code, body) = match path.as_str() {
                    HISTORY if has_history => (200, HISTORY_JSON.to_owned()),
                    HISTORY => (404, String::new()),
                    STATUS => (200, format!("{{\"started_unix\":{started},\"now_unix_ms\":205000}}")),
                    _ => (200, "{\"last\":null,\"decisions\":[]}".to_owned()),
                };
                let answer = format!(
                    "HTTP/1.1 {code} -\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                if stream.write_all(answer.as_bytes()).is_err() || sender.send(path).is_err() {
                    return;
                }
            }
        });
        (address, asked)
    }

    const HISTORY_JSON: &str = r#"{"started_unix":100,"period_s":10,"samples":[{"now_unix_ms":201000,"active":1,
        "waiting":0,"requests":5,"histograms":{"routing":{"le":[0.1],"counts":[4,1],"sum":0.2}}}]}"#;

    #[tokio::test]
    async fn the_past_is_asked_for_once_in_each_run_of_the_gateway() {
        for (has_history, is_interactive) in [(true, true), (false, true), (true, false)] {
            let (address, asked) = gateway(has_history);
            let interval = Duration::from_millis(100);
            let config = TopConfig { gateway: address, key: None, tls: None, interval, view: View::Overview };
            let target = config.target().expect("a target");
            let mut gateway =
                Gateway { target, is_interactive, connection: None, started_unix: 0, last_decision: None };
            let mut samples = Vec::new();
            for _ in 0..4 {
                let answer = gateway.poll().await.expect("an answer");
                let requests = answer.samples.iter().map(|sample| sample.counters.requests);
                samples.push(requests.collect::<Vec<_>>());
            }
            let expected = if has_history && is_interactive { vec![5] } else { Vec::new() };
            assert_eq!(samples, [expected.clone(), Vec::new(), expected, Vec::new()]);
            let count = asked.try_iter().filter(|path| path == HISTORY).count();
            assert_eq!(count, if is_interactive { 2 } else { 0 });
        }
    }
}
