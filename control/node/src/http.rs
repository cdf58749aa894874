//! Listeners, the signals that stop a server, and its shutdown deadline.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::serve::Listener;
use router_serve::ServeConfig;
use router_tls::PeerAddr;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Most connections that wait to be accepted, per listener; the kernel may allow fewer.
const BACKLOG: u32 = 4096;

/// Binds the address; the error names it.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// Binds an address once for each of several threads: the kernel spreads connections over the listeners. The
/// first listener binds alone, so that the call fails if another process has the address. With `reuses_port`
/// it shares the address with a process of the same user.
pub(crate) fn bind_shared(
    address: SocketAddr,
    listeners: usize,
    reuses_port: bool,
) -> Result<Vec<std::net::TcpListener>> {
    let socket = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        std::io::Result::Ok(socket)
    };
    let bind = || {
        let first = socket()?;
        first.set_reuseport(reuses_port)?;
        first.bind(address)?;
        // The other listeners can bind from here on.
        first.set_reuseport(true)?;
        // The address with the actual port, if port 0 was given.
        let address = first.local_addr()?;
        let mut all = vec![first.listen(BACKLOG)?.into_std()?];
        for _ in 1..listeners {
            let next = socket()?;
            next.set_reuseport(true)?;
            next.bind(address)?;
            all.push(next.listen(BACKLOG)?.into_std()?);
        }
        std::io::Result::Ok(all)
    };
    bind().with_context(|| format!("cannot listen on {address}"))
}

/// Deadline by which a server must have ended; `None` until it is told to stop.
pub(crate) type Stop = watch::Receiver<Option<Instant>>;

/// A signal that stops a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// Behaves like SIGTERM.
    Terminate,
    /// Behaves like SIGINT.
    Interrupt,
}

/// Source of stop signals.
#[derive(Debug)]
pub enum StopSource {
    /// SIGTERM and SIGINT of this process.
    Process,
    /// A channel from a caller that runs several servers in one process.
    Channel(mpsc::UnboundedReceiver<StopSignal>),
}

/// Receiver of stop signals.
enum StopListener {
    Process { terminate: Signal, interrupt: Signal },
    Channel(mpsc::UnboundedReceiver<StopSignal>),
}

impl StopListener {
    fn new(source: StopSource) -> Result<Self> {
        Ok(match source {
            StopSource::Process => Self::Process {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
            },
            StopSource::Channel(channel) => Self::Channel(channel),
        })
    }

    async fn recv(&mut self) -> StopSignal {
        match self {
            Self::Process { terminate, interrupt } => tokio::select! {
                _ = terminate.recv() => StopSignal::Terminate,
                _ = interrupt.recv() => StopSignal::Interrupt,
            },
            Self::Channel(channel) => match channel.recv().await {
                Some(signal) => signal,
                // Every sender was dropped, so no signal can arrive.
                None => std::future::pending().await,
            },
        }
    }
}

/// Shutdown state: whether load balancers should leave, and then the deadline.
pub(crate) struct Signals {
    /// True from the first signal on.
    pub(crate) is_leaving: watch::Receiver<bool>,
    pub(crate) stop: Stop,
}

/// Starts to listen for stop signals: the first gives requests in flight `drain` to end, the second ends them
/// at once. After a single SIGTERM the server continues to accept for `unready_for`, so that load balancers
/// can leave first; a second signal within that time starts the drain, and a third one ends all requests at
/// once.
pub(crate) fn listen_for_stop(source: StopSource, drain: Duration, unready_for: Duration) -> Result<Signals> {
    let mut signals = StopListener::new(source)?;
    let (stop, stopped) = watch::channel(None);
    let (leave, is_leaving) = watch::channel(false);
    tokio::spawn(async move {
        let is_terminated = signals.recv().await == StopSignal::Terminate;
        // Without receivers the value is not needed.
        let _unheard = leave.send(true);
        if is_terminated && !unready_for.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(unready_for) => {}
                _ = signals.recv() => {}
            }
        }
        let _over = stop.send(Some(Instant::now() + drain));
        signals.recv().await;
        let _over = stop.send(Some(Instant::now()));
        std::future::pending::<()>().await;
    });
    Ok(Signals { is_leaving, stop: stopped })
}

/// Listens for the stop signals of a server without a load balancer in front of it.
pub(crate) fn stop_signals(source: StopSource, drain: Duration) -> Result<Stop> {
    Ok(listen_for_stop(source, drain, Duration::ZERO)?.stop)
}

/// Waits until the deadline.
pub(crate) async fn deadline(mut stop: Stop) {
    loop {
        let until = *stop.borrow_and_update();
        let sleep = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => return,
            changed = stop.changed() => if changed.is_err() { return },
        }
    }
}

/// Serves until `stop` has a deadline, then completes requests in flight until the deadline.
pub(crate) async fn serve<L>(listener: L, router: Router, stop: Stop)
where
    L: Listener<Addr = PeerAddr>,
{
    serve_with(listener, router, stop, ServeConfig::default()).await;
}

/// Serves as [`serve`] does, with the given limits.
pub(crate) async fn serve_with<L>(listener: L, router: Router, stop: Stop, config: ServeConfig)
where
    L: Listener<Addr = PeerAddr>,
{
    let mut told = stop.clone();
    let told = async move { drop(told.wait_for(Option::is_some).await) };
    tokio::select! {
        () = router_serve::serve(listener, router, config, told) => {}
        () = deadline(stop) => tracing::warn!("requests were still in flight at the end of the drain time"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAIN: Duration = Duration::from_secs(30);
    const UNREADY: Duration = Duration::from_secs(5);

    fn listen(unready_for: Duration) -> (mpsc::UnboundedSender<StopSignal>, Signals) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let signals = listen_for_stop(StopSource::Channel(receiver), DRAIN, unready_for);
        (sender, signals.expect("a channel needs nothing of the system"))
    }

    /// Returns the time left until the deadline, once the listener has received the stop.
    async fn time_left(stop: &Stop) -> Option<Duration> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        stop.borrow().map(|until| until.saturating_duration_since(Instant::now()))
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_signal_gives_time_and_the_second_none() {
        for first in [StopSignal::Terminate, StopSignal::Interrupt] {
            let (sender, Signals { is_leaving, stop }) = listen(Duration::ZERO);
            assert_eq!((*is_leaving.borrow(), time_left(&stop).await), (false, None));
            sender.send(first).expect("somebody listens");
            let left = time_left(&stop).await.expect("an end");
            assert!(*is_leaving.borrow() && left > DRAIN - Duration::from_secs(1), "{first:?}: {left:?}");
            sender.send(StopSignal::Interrupt).expect("somebody listens");
            assert_eq!(time_left(&stop).await, Some(Duration::ZERO), "{first:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sigterm_alone_lets_load_balancers_leave_first() {
        let (sender, Signals { is_leaving, stop }) = listen(UNREADY);
        sender.send(StopSignal::Terminate).expect("somebody listens");
        assert_eq!((time_left(&stop).await, *is_leaving.borrow()), (None, true));
        tokio::time::sleep(UNREADY).await;
        assert!(time_left(&stop).await > Some(Duration::ZERO));
        let (sender, Signals { stop, .. }) = listen(UNREADY);
        sender.send(StopSignal::Interrupt).expect("somebody listens");
        assert!(time_left(&stop).await > Some(Duration::ZERO), "a person does not wait");
        let (sender, Signals { stop, .. }) = listen(UNREADY);
        [StopSignal::Terminate; 2]
            .into_iter()
            .for_each(|signal| sender.send(signal).expect("somebody listens"));
        assert!(time_left(&stop).await > Some(Duration::ZERO), "a second signal ends that time");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_without_anybody_to_stop_it_goes_on() {
        let (sender, Signals { stop, .. }) = listen(Duration::ZERO);
        drop(sender);
        tokio::time::sleep(DRAIN).await;
        assert_eq!(time_left(&stop).await, None);
    }
}
