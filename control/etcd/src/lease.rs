//! Leader election by a key in etcd: the process that created the key leads as long as it renews the key's
//! lease.

use control_discovery::election::{LEASE_DURATION, Lease};

use crate::client::{Client, EtcdError};
use crate::rpc::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::rpc::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, request_op::Request, response_op::Response,
};

/// The lease of an election, kept in etcd.
pub struct EtcdLease {
    client: Client,
    key: String,
    identity: String,
    lease: Option<i64>,
}

impl EtcdLease {
    /// Creates a candidate in the election `name`, below `PREFIX/leaders/`. `identity` must differ between
    /// processes.
    #[must_use]
    pub fn new(client: Client, prefix: &str, name: &str, identity: &str) -> Self {
        let key = format!("{}/leaders/{name}", prefix.trim_end_matches('/'));
        Self { client, key, identity: identity.to_owned(), lease: None }
    }

    /// Creates the key with this lease unless it exists; returns whether the key now has this lease.
    async fn take(&self, lease: i64) -> Result<bool, EtcdError> {
        let key = self.key.as_bytes().to_vec();
        let is_absent = Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Create.into(),
            key: key.clone(),
            target_union: Some(TargetUnion::CreateRevision(0)),
        };
        let operation = |request| RequestOp { request: Some(request) };
        let put = PutRequest { key: key.clone(), value: self.identity.clone().into(), lease };
        let get = RangeRequest { key, ..RangeRequest::default() };
        let transaction = TxnRequest {
            compare: vec![is_absent],
            success: vec![operation(Request::RequestPut(put))],
            failure: vec![operation(Request::RequestRange(get))],
        };
        let answer = self.client.transaction(transaction).await?;
        let found = answer.responses.into_iter().find_map(|response| match response.response? {
            Response::ResponseRange(range) => range.kvs.into_iter().next(),
            Response::ResponsePut(_) => None,
        });
        Ok(answer.succeeded || found.is_some_and(|found| found.lease == lease))
    }

    /// Whether the key does not exist.
    async fn is_free(&self) -> Result<bool, EtcdError> {
        let found = self.client.get(&self.key).await?;
        Ok(found.is_none())
    }
}

impl Lease for EtcdLease {
    type Error = EtcdError;

    fn name(&self) -> &str {
        &self.key
    }

    async fn attempt(&mut self) -> Result<bool, EtcdError> {
        if let Some(lease) = self.lease {
            match self.client.keep_alive(lease).await {
                Ok(()) if self.take(lease).await? => return Ok(true),
                // The key was deleted by hand and another process has created it.
                Ok(()) => {
                    self.lease = None;
                    self.client.revoke(lease).await?;
                    return Ok(false);
                }
                Err(EtcdError::LeaseGone) => self.lease = None,
                Err(error) => return Err(error),
            }
        }
        if !self.is_free().await? {
            return Ok(false);
        }
        let lease = *self.lease.insert(self.client.grant(LEASE_DURATION.as_secs() as i64).await?);
        let is_own = self.take(lease).await?;
        if !is_own {
            self.lease = None;
            self.client.revoke(lease).await?;
        }
        Ok(is_own)
    }

    async fn release(&mut self) -> Result<(), EtcdError> {
        match self.lease.take() {
            Some(lease) => self.client.revoke(lease).await,
            None => Ok(()),
        }
    }
}
