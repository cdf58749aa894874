//! Slots of one tier that each tenant has, and may have.
//!
//! A tenant with a quota has an account, and its candidates form a list of their own, so that it can be made to
//! evict its own blocks without a search. Tenants without one share account 0 and cost nothing. Own lists follow
//! CLOCK: what was used since it was listed gets another round.

use std::collections::HashMap;

use crate::config::TenantId;
use crate::list::{List, OWN};

/// The account of all tenants without one of their own.
pub(crate) const SHARED: u16 = 0;

#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) quota: u32,
    /// Slots that are not free.
    pub(crate) used: u32,
    pub(crate) own: List<OWN>,
    /// Named in the configuration: never given to another tenant.
    fixed: bool,
}

impl Account {
    pub(crate) fn is_limited(&self) -> bool {
        self.quota != u32::MAX
    }
}

#[derive(Debug)]
pub(crate) struct Tenants {
    by_tenant: HashMap<TenantId, u16>,
    pub(crate) accounts: Vec<Account>,
    default_quota: Option<u32>,
    tenants_max: usize,
}

impl Tenants {
    pub(crate) fn new(
        default_quota: Option<u32>,
        tenants_max: u16,
        quotas: impl Iterator<Item = (TenantId, u32)>,
    ) -> Self {
        let shared = Account {
            tenant: None,
            quota: default_quota.unwrap_or(u32::MAX),
            used: 0,
            own: List::EMPTY,
            fixed: true,
        };
        let mut tenants = Self {
            by_tenant: HashMap::with_capacity(usize::from(tenants_max)),
            accounts: Vec::with_capacity(usize::from(tenants_max) + 1),
            default_quota,
            tenants_max: usize::from(tenants_max),
        };
        tenants.accounts.push(shared);
        for (tenant, quota) in quotas {
            tenants.add(tenant, quota, true);
        }
        tenants
    }

    fn add(&mut self, tenant: TenantId, quota: u32, fixed: bool) -> u16 {
        if let Some(&account) = self.by_tenant.get(&tenant) {
            return account;
        }
        let added = Account { tenant: Some(tenant), quota, used: 0, own: List::EMPTY, fixed };
        let account = if self.accounts.len() <= self.tenants_max {
            self.accounts.push(added);
            self.accounts.len() - 1
        } else {
            // The account of a tenant that has no slots is reused.
            let idle = |account: &Account| account.used == 0 && !account.fixed;
            let Some(account) = self.accounts.iter().position(idle) else { return SHARED };
            if let Some(left) = self.accounts[account].tenant {
                self.by_tenant.remove(&left);
            }
            self.accounts[account] = added;
            account
        };
        self.by_tenant.insert(tenant, account as u16);
        account as u16
    }

    /// The tenant's account, opened if need be.
    pub(crate) fn account(&mut self, tenant: TenantId) -> u16 {
        match (self.by_tenant.get(&tenant), self.default_quota) {
            (Some(&account), _) => account,
            (None, None) => SHARED,
            (None, Some(quota)) => self.add(tenant, quota, false),
        }
    }

    pub(crate) fn find(&self, tenant: TenantId) -> Option<&Account> {
        self.by_tenant.get(&tenant).map(|&account| &self.accounts[usize::from(account)])
    }
}
