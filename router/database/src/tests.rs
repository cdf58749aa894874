//! Tests of the database of stored objects.

use super::*;

/// Path of a file that is removed at the end.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

fn config(scratch: &Scratch) -> Config {
    Config {
        path: scratch.0.clone(),
        keep: Duration::from_secs(60),
        bytes_max: 1 << 20,
        tenant_bytes_max: 1 << 16,
    }
}

fn opened(test: &str) -> (Scratch, Database) {
    let name = format!("kvasir-database-{test}-{}.redb", std::process::id());
    let scratch = Scratch(std::env::temp_dir().join(name));
    let database = Database::open(config(&scratch)).expect("opens");
    (scratch, database)
}

fn key(tenant: &str, id: &str) -> Key {
    Key::new(&tenant.into(), Collection::Response, id)
}

async fn put(database: &Database, key: Key, document: &[u8]) -> Result<(), Error> {
    let (expires, document) = (database.expires(), document.to_vec());
    database.write(move |transaction| transaction.put(key, expires, document)).await
}

async fn ids(database: &Database, tenant: &'static str, prefix: &'static str) -> Vec<String> {
    let walked = database.read(move |snapshot| {
        let mut ids = Vec::new();
        snapshot.walk(tenant, Collection::Response, prefix, None, |id, _| {
            ids.push(id.to_owned());
            true
        })?;
        Ok(ids)
    });
    walked.await.expect("reads")
}

#[tokio::test]
async fn documents_are_there_after_the_file_is_opened_again() {
    let (scratch, database) = opened("again");
    put(&database, key("a", "1"), b"one").await.expect("room");
    assert_eq!(database.get(key("a", "1")).await, Ok(Some(b"one".to_vec())));
    let bytes = database.bytes();
    assert_eq!(bytes, 5);
    let again = Database::open(config(&scratch)).expect_err("it is open");
    assert!(again.to_string().contains("kvasir-database-again"), "{again}");
    drop(database);
    let database = Database::open(config(&scratch)).expect("opens");
    assert_eq!(database.get(key("a", "1")).await, Ok(Some(b"one".to_vec())));
    assert_eq!(database.bytes(), bytes);
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(config(&scratch).path).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn a_tenant_sees_its_own_documents_alone() {
    let (_scratch, database) = opened("tenants");
    for (tenant, id) in [("a", "x/1"), ("a", "x/2"), ("a", "y/1"), ("ab", "x/3"), ("b", "x/1")] {
        put(&database, key(tenant, id), tenant.as_bytes()).await.expect("room");
    }
    assert_eq!(ids(&database, "a", "x/").await, ["x/1", "x/2"]);
    assert_eq!(ids(&database, "ab", "").await, ["x/3"]);
    assert_eq!(database.get(key("b", "x/2")).await, Ok(None));
    let other = Key::new(&"a".into(), Collection::File, "x/1");
    assert_eq!(database.get(other).await, Ok(None), "another collection");
    let deleted = database.write(|transaction| {
        transaction.delete_all(&"a".into(), Collection::Response, "x/")?;
        transaction.delete(key("b", "x/1"))
    });
    assert_eq!(deleted.await, Ok(true));
    assert_eq!(ids(&database, "a", "").await, ["y/1"]);
    assert_eq!(ids(&database, "b", "").await, [""; 0]);
    assert_eq!(ids(&database, "ab", "").await, ["x/3"]);
}

#[tokio::test]
async fn what_fails_changes_nothing() {
    let (_scratch, database) = opened("fails");
    put(&database, key("a", "1"), b"old").await.expect("room");
    let expires = database.expires();
    let failed = database.write(move |transaction| {
        transaction.put(key("a", "1"), expires, b"new".to_vec())?;
        transaction.delete(key("a", "2"))?;
        assert_eq!(transaction.get(&key("a", "1")), Ok(Some(b"new".to_vec())), "staged");
        transaction.put(key("a", "3"), expires, vec![0; 1 << 16])
    });
    assert_eq!(failed.await, Err(Error::TenantFull(1 << 16)));
    assert_eq!(database.get(key("a", "1")).await, Ok(Some(b"old".to_vec())));
    assert_eq!(database.bytes(), 5);
}

#[tokio::test]
async fn documents_take_no_more_room_than_they_may() {
    let (_scratch, database) = opened("room");
    let half = vec![0; 1 << 15];
    put(&database, key("a", "1"), &half).await.expect("room");
    assert_eq!(put(&database, key("a", "2"), &half).await, Err(Error::TenantFull(1 << 16)));
    // Replacing a document needs no further room.
    put(&database, key("a", "1"), &half).await.expect("room");
    let mut full = None;
    for tenant in 0..64 {
        match put(&database, key(&format!("tenant {tenant}"), "1"), &half).await {
            Ok(()) => {}
            Err(error) => full = full.or(Some((tenant, error))),
        }
    }
    // With its key, each document takes 64 KiB of pages.
    assert_eq!(full, Some((15, Error::Full)), "1 MiB in all");
    assert!(database.bytes() <= 1 << 20);
    // Final states are written beyond the quota, and are counted.
    let (expires, before) = (database.expires(), database.bytes());
    let ended = move |transaction: &mut Transaction<'_>| {
        transaction.put_beyond_quota(key("a", "2"), expires, b"over".to_vec())
    };
    database.write(ended).await.expect("written");
    assert_eq!(database.bytes(), before + 6);
}

#[tokio::test]
async fn what_is_over_is_not_seen_and_removed() {
    let (scratch, database) = opened("over");
    let over = unix_seconds();
    let written = database.write(move |transaction| {
        transaction.put(key("a", "over"), over, b"x".to_vec())?;
        transaction.put(key("a", "kept"), over + 60, b"y".to_vec())
    });
    written.await.expect("room");
    assert_eq!(database.get(key("a", "over")).await, Ok(None));
    assert_eq!(ids(&database, "a", "").await, ["kept"]);
    // A sweep runs at the start.
    drop(database);
    let database = Database::open(config(&scratch)).expect("opens");
    put(&database, key("b", "1"), b"").await.expect("room");
    assert_eq!(database.bytes(), 6 + 2);
    assert_eq!(database.get(key("a", "kept")).await, Ok(Some(b"y".to_vec())));
}

#[tokio::test]
async fn many_writers_are_committed_together_and_lose_nothing() {
    let (_scratch, database) = opened("together");
    let database = Arc::new(database);
    let count = |database: Arc<Database>| async move {
        let written = database.write(|transaction| {
            let before = transaction.get(&key("a", "count"))?.map_or(0, |bytes| bytes.len());
            transaction.put(key("a", "count"), unix_seconds() + 60, vec![0; before + 1])
        });
        written.await.expect("room");
    };
    let writers: Vec<_> = (0..200).map(|_| tokio::spawn(count(Arc::clone(&database)))).collect();
    for writer in writers {
        writer.await.expect("ends");
    }
    assert_eq!(database.get(key("a", "count")).await.expect("reads").map(|bytes| bytes.len()), Some(200));
}
