//! KEDA's external scaler: a gRPC service that returns the number of workers that a pool should have.
//!
//! Source: `kedacore/keda` `pkg/scalers/externalscaler/externalscaler.proto` and "External Scalers" of its documentation. A
//! `ScaledObject` names the pool in its trigger's metadata:
//!
//! ```yaml
//! triggers:
//! - type: external-push
//!   metricType: AverageValue
//!   metadata: {scalerAddress: "kvasir-control:8091", pool: decode, tolerance: "0.1"}
//! ```
//!
//! | Call | Answer |
//! | --- | --- |
//! | `IsActive` | whether the pool should have any worker |
//! | `StreamIsActive` | the same at once, and again with each change |
//! | `GetMetricSpec` | the metric `kvasir-workers`, 1 a replica |
//! | `GetMetrics` | the value that makes the autoscaler set the wanted count (`hpa`) |
//!
//! Until the planner has decided, and for a pool that is not planned, calls fail with UNAVAILABLE or NOT_FOUND: KEDA then
//! keeps the replicas, or sets the ScaledObject's `fallback`. `tolerance` is that of the autoscaler, 0.1 unless its `behavior`
//! sets another one.

use std::collections::BTreeMap;

use futures_util::stream::{BoxStream, StreamExt, unfold};
use tonic::{Request, Response, Status};

use crate::desired::{DesiredCounts, PoolTarget};
use crate::hpa::{DEFAULT_TOLERANCE, published};
use proto::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use proto::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec, MetricValue,
    ScaledObjectRef,
};

#[allow(missing_docs, unreachable_pub, clippy::all)]
mod proto {
    tonic::include_proto!("externalscaler");
}

/// Name of the metric.
const METRIC: &str = "kvasir-workers";

/// The service, as gRPC routes for an HTTP/2 server.
#[must_use]
pub fn keda_routes(counts: DesiredCounts) -> tonic::service::Routes {
    tonic::service::Routes::new(ExternalScalerServer::new(Scaler { counts }))
}

#[derive(Debug)]
struct Scaler {
    counts: DesiredCounts,
}

/// The relevant metadata of a trigger.
#[derive(Debug, Clone, PartialEq)]
struct Trigger {
    pool: String,
    tolerance: f64,
}

impl Trigger {
    fn parse(metadata: &BTreeMap<String, String>) -> Result<Self, Status> {
        let Some(pool) = metadata.get("pool").filter(|pool| !pool.is_empty()) else {
            return Err(Status::invalid_argument("the trigger's metadata name no `pool`"));
        };
        let tolerance = match metadata.get("tolerance") {
            None => DEFAULT_TOLERANCE,
            Some(text) => {
                let parsed = text.parse().ok().filter(|tolerance| (0.0..1.0).contains(tolerance));
                parsed.ok_or_else(|| {
                    Status::invalid_argument(format!(
                        "the trigger's `tolerance` {text:?} is no number from 0 to 1"
                    ))
                })?
            }
        };
        Ok(Self { pool: pool.clone(), tolerance })
    }

    /// Returns the count of this trigger's pool.
    fn target<'a>(&self, counts: Option<&'a Vec<PoolTarget>>) -> Result<&'a PoolTarget, Status> {
        let counts = counts.ok_or_else(|| Status::unavailable("the planner has not decided yet"))?;
        counts.iter().find(|target| target.pool == self.pool).ok_or_else(|| {
            let known: Vec<&str> = counts.iter().map(|target| target.pool.as_str()).collect();
            Status::not_found(format!("no pool `{}` is planned, but {}", self.pool, known.join(", ")))
        })
    }
}

#[tonic::async_trait]
impl ExternalScaler for Scaler {
    type StreamIsActiveStream = BoxStream<'static, Result<IsActiveResponse, Status>>;

    async fn is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<IsActiveResponse>, Status> {
        let trigger = Trigger::parse(&request.into_inner().scaler_metadata)?;
        let result = trigger.target(self.counts.borrow().as_ref())?.wanted > 0;
        Ok(Response::new(IsActiveResponse { result }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        let trigger = Trigger::parse(&request.into_inner().scaler_metadata)?;
        let mut counts = self.counts.clone();
        counts.mark_changed();
        let stream = unfold((counts, trigger, None), |(mut counts, trigger, mut last)| async move {
            loop {
                // The planner has ended, so the stream ends and KEDA connects again.
                counts.changed().await.ok()?;
                let wanted =
                    trigger.target(counts.borrow_and_update().as_ref()).ok().map(|target| target.wanted);
                if wanted.is_some() && wanted != std::mem::replace(&mut last, wanted) {
                    let result = wanted.is_some_and(|wanted| wanted > 0);
                    return Some((Ok(IsActiveResponse { result }), (counts, trigger, last)));
                }
            }
        });
        Ok(Response::new(stream.boxed()))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        Trigger::parse(&request.into_inner().scaler_metadata)?;
        let spec = MetricSpec { metric_name: METRIC.to_owned(), target_size: 1, target_size_float: 1.0 };
        Ok(Response::new(GetMetricSpecResponse { metric_specs: vec![spec] }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let asked = request.into_inner();
        let trigger = Trigger::parse(&asked.scaled_object_ref.unwrap_or_default().scaler_metadata)?;
        let counts = self.counts.borrow();
        let target = trigger.target(counts.as_ref())?;
        let value = published(target.current, target.wanted, trigger.tolerance);
        if value.expected != target.wanted {
            tracing::info!(
                pool = target.pool,
                current = target.current,
                wanted = target.wanted,
                expected = value.expected,
                "the autoscaler ignores changes within its tolerance of {}; behavior.scaleUp.tolerance and \
                 behavior.scaleDown.tolerance of the ScaledObject's autoscaler change that",
                trigger.tolerance
            );
        }
        let value = MetricValue {
            metric_name: METRIC.to_owned(),
            metric_value: i64::from(value.value),
            metric_value_float: f64::from(value.value),
        };
        Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::desired_counts;

    fn metadata(pairs: &[(&str, &str)]) -> ScaledObjectRef {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ScaledObjectRef { scaler_metadata: pairs.collect(), ..ScaledObjectRef::default() }
    }

    fn target(wanted: u32) -> PoolTarget {
        PoolTarget { pool: "decode".to_owned(), wanted, current: 10, text: String::new() }
    }

    async fn value(scaler: &Scaler, object: ScaledObjectRef) -> Result<i64, tonic::Code> {
        let request = GetMetricsRequest { scaled_object_ref: Some(object), metric_name: METRIC.to_owned() };
        let answer = scaler.get_metrics(Request::new(request)).await;
        answer.map(|answer| answer.into_inner().metric_values[0].metric_value).map_err(|status| status.code())
    }

    #[tokio::test]
    async fn nothing_is_told_before_the_planner_has_decided() {
        let (sender, counts) = desired_counts();
        let scaler = Scaler { counts };
        assert_eq!(value(&scaler, metadata(&[("pool", "decode")])).await, Err(tonic::Code::Unavailable));
        sender.publish(vec![target(11)]);
        assert_eq!(value(&scaler, metadata(&[("pool", "decode")])).await, Ok(12));
        assert_eq!(value(&scaler, metadata(&[("pool", "decode"), ("tolerance", "0")])).await, Ok(11));
        assert_eq!(value(&scaler, metadata(&[("pool", "prefill")])).await, Err(tonic::Code::NotFound));
        for bad in [&[][..], &[("pool", "")], &[("pool", "decode"), ("tolerance", "2")]] {
            assert_eq!(value(&scaler, metadata(bad)).await, Err(tonic::Code::InvalidArgument), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_change_is_pushed_at_once() {
        let (sender, counts) = desired_counts();
        let scaler = Scaler { counts };
        let asked = Request::new(metadata(&[("pool", "decode")]));
        let mut pushed = scaler.stream_is_active(asked).await.expect("a stream").into_inner();
        let mut next = async || pushed.next().await.map(|answer| answer.expect("an answer").result);
        sender.publish(vec![target(2)]);
        assert_eq!(next().await, Some(true));
        sender.publish(vec![target(2)]);
        let published = std::time::Instant::now();
        sender.publish(vec![target(0)]);
        assert_eq!(next().await, Some(false));
        assert!(published.elapsed() < std::time::Duration::from_millis(100), "{:?}", published.elapsed());
        drop(sender);
        assert_eq!(next().await, None);
    }
}
