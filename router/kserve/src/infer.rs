//! Processing of a unary request, and of one request of a stream.

use std::sync::Arc;

use futures_util::Stream;
use futures_util::stream::unfold;
use http::{HeaderMap, header};
use http_body_util::{BodyExt, Limited};
use serde_json::Value;
use tokio::time::Instant;

use crate::answer::{self, Piece};
use crate::backend::{Answer, Backend, Call};
use crate::config::Config;
use crate::error::{Error, returned};
use crate::headers::{after, earlier, within};
use crate::proto::inference::{ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use crate::request::{ParsedRequest, ResponseSpec};
use crate::sse::Events;

/// Answers one request; the returned headers become the client's metadata.
pub(crate) async fn infer<B: Backend>(
    backend: &B,
    config: &Config,
    headers: HeaderMap,
    deadline: Option<Instant>,
    request: ModelInferRequest,
) -> Result<(ModelInferResponse, HeaderMap), Error> {
    let plan = ParsedRequest::read(request)?;
    if plan.is_streamed {
        return Err(Error::field("stream", "a streamed answer needs ModelStreamInfer"));
    }
    let deadline = earlier(deadline, plan.timeout.and_then(after));
    within(deadline, async {
        let answer = accepted(backend.completions(Call { headers, body: plan.body }).await).await?;
        let seen = returned(answer.headers());
        let response = answer::whole(&plan.ask, &json_of(answer, config.answer_bytes_max).await?)?;
        Ok((response, seen))
    })
    .await?
}

/// Answers one request of a stream. The last response is marked as such: the piece with the finish reason,
/// the one with an error, or an empty one if the client requested that. Only if an engine ends without a
/// finish reason, a client that did not request an empty one gets no mark.
pub(crate) fn responses<B: Backend>(
    backend: Arc<B>,
    config: Arc<Config>,
    headers: HeaderMap,
    request: ModelInferRequest,
) -> impl Stream<Item = ModelStreamInferResponse> + Send {
    let (id, model) = (request.id.clone(), request.model_name.clone());
    let begun =
        RequestProgress { config, deadline: None, step: Step::Begin(Begin { backend, headers, request }) };
    unfold((begun, id, model), |(work, id, model)| async move {
        match work.next().await {
            Ok(Some((response, work))) => Some((response, (work, id, model))),
            Ok(None) => None,
            Err((error, work)) => Some((answer::failed(&id, &model, &error), (work, id, model))),
        }
    })
}

/// State of a request of a stream.
struct RequestProgress<B> {
    config: Arc<Config>,
    deadline: Option<Instant>,
    step: Step<B>,
}

struct Begin<B> {
    backend: Arc<B>,
    headers: HeaderMap,
    request: ModelInferRequest,
}

enum Step<B> {
    Begin(Begin<B>),
    Pieces { ask: ResponseSpec, events: Box<Events>, has_last: bool },
    Final(ResponseSpec),
    Over,
}

type Next<B> = Result<Option<(ModelStreamInferResponse, RequestProgress<B>)>, (Error, RequestProgress<B>)>;

impl<B: Backend> RequestProgress<B> {
    /// Returns the next response. After an error none follows.
    async fn next(self) -> Next<B> {
        let Self { config, mut deadline, mut step } = self;
        loop {
            let moved = match step {
                Step::Over => return Ok(None),
                Step::Final(ask) => Ok((Some(answer::empty_final(&ask)), Step::Over)),
                Step::Begin(begin) => begin.run(&config, &mut deadline).await,
                Step::Pieces { ask, events, has_last } => pieces(ask, events, has_last, deadline).await,
            };
            match moved {
                Ok((Some(response), step)) => return Ok(Some((response, Self { config, deadline, step }))),
                Ok((None, next)) => step = next,
                Err(error) => return Err((error, Self { config, deadline, step: Step::Over })),
            }
        }
    }
}

type Moved<B> = Result<(Option<ModelStreamInferResponse>, Step<B>), Error>;

impl<B: Backend> Begin<B> {
    async fn run(self, config: &Config, deadline: &mut Option<Instant>) -> Moved<B> {
        let plan = ParsedRequest::read(self.request)?;
        *deadline = plan.timeout.and_then(after);
        let call = Call { headers: self.headers, body: plan.body };
        let ask = plan.ask;
        within(*deadline, async {
            let answer = accepted(self.backend.completions(call).await).await?;
            if is_events(&answer) {
                let events = Box::new(Events::new(answer.into_body(), config.answer_bytes_max));
                return Ok((None, Step::Pieces { ask, events, has_last: false }));
            }
            let response = answer::whole(&ask, &json_of(answer, config.answer_bytes_max).await?)?;
            let response = answer::streamed(response, !ask.has_empty_final);
            Ok((Some(response), if ask.has_empty_final { Step::Final(ask) } else { Step::Over }))
        })
        .await?
    }
}

/// Returns the next piece. The body is read to its end, also after the last piece, so that its connection
/// can be used again; an error after the last piece is ignored.
async fn pieces<B>(
    ask: ResponseSpec,
    mut events: Box<Events>,
    mut has_last: bool,
    deadline: Option<Instant>,
) -> Moved<B> {
    loop {
        let event = match within(deadline, events.next()).await.flatten() {
            Err(error) if !has_last => return Err(error),
            Err(_) => None,
            Ok(None) if !has_last => return Err(Error::Answer("it broke off before its end".to_owned())),
            Ok(event) => event.filter(|data| data != b"[DONE]"),
        };
        let Some(data) = event else {
            return Ok((None, if ask.has_empty_final { Step::Final(ask) } else { Step::Over }));
        };
        if has_last {
            continue;
        }
        let chunk: Value = serde_json::from_slice(&data)
            .map_err(|error| Error::Answer(format!("an event is no JSON: {error}")))?;
        if let Some(Piece { response, is_last }) = answer::piece(&ask, &chunk)? {
            has_last = is_last;
            let is_final = is_last && !ask.has_empty_final;
            return Ok((Some(answer::streamed(response, is_final)), Step::Pieces { ask, events, has_last }));
        }
    }
}

/// Returns the answer, unless it is an error.
pub(crate) async fn accepted(answer: Answer) -> Result<Answer, Error> {
    if answer.status().is_success() { Ok(answer) } else { Err(Error::refused(answer).await) }
}

/// Parses the answer's JSON.
pub(crate) async fn json_of(answer: Answer, bytes_max: usize) -> Result<Value, Error> {
    let collected = Limited::new(answer.into_body(), bytes_max).collect().await;
    let bytes = collected.map_err(|error| Error::Answer(format!("it broke off: {error}")))?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|error| Error::Answer(format!("it is no JSON: {error}")))
}

fn is_events(answer: &Answer) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}
