//! Stored responses: bounded, in memory, and readable only by the client that created them.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::stream::{Stream, unfold};
use octavo_engine::ClientId;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::api::responses::request::add_item;
use crate::config::StoreLimits;
use crate::lock::lock;

/// Bytes that an entry costs beside its texts.
const ENTRY: usize = 512;

/// The owner ([`Caller::owner`]) and the id of a response. A response is found only by its owner, so that clients cannot
/// read each other's, even if they choose the same request id.
///
/// [`Caller::owner`]: crate::caller::Caller::owner
type Key = (ClientId, String);

/// The responses of a server. The oldest is forgotten when there are too many or they need too much memory; a response
/// that is forgotten while it runs is aborted.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    limits: StoreLimits,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_key: HashMap<Key, Entry>,
    /// Keys by number, which is the order of creation.
    order: BTreeMap<u64, Key>,
    next: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    /// The response as JSON.
    body: Bytes,
    /// The messages so far as JSON, without instructions.
    conversation: Bytes,
    /// The events of a background stream; event number n is at index n.
    events: Option<Vec<Bytes>>,
    ended: bool,
    /// Signalled at every change; closed when the entry is forgotten.
    changed: watch::Sender<()>,
    task: Option<AbortHandle>,
}

impl Entry {
    fn bytes(&self) -> usize {
        let events = self.events.iter().flatten().map(Bytes::len).sum::<usize>();
        ENTRY + self.body.len() + self.conversation.len() + events
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Entries {
    fn forget(&mut self, key: &Key) {
        if let Some(entry) = self.by_key.remove(key) {
            self.order.remove(&entry.number);
            self.bytes -= entry.bytes();
        }
    }

    fn insert(&mut self, key: Key, entry: Entry, limits: StoreLimits) {
        self.forget(&key);
        self.bytes += entry.bytes();
        self.order.insert(entry.number, key.clone());
        self.by_key.insert(key, entry);
        self.shrink(limits);
    }

    /// Changes an entry, unless it is forgotten or replaced.
    fn change<T>(
        &mut self,
        key: &Key,
        number: u64,
        limits: StoreLimits,
        change: impl FnOnce(&mut Entry) -> T,
    ) -> Option<T> {
        let entry = self.by_key.get_mut(key).filter(|entry| entry.number == number)?;
        let before = entry.bytes();
        let result = change(entry);
        self.bytes = self.bytes - before + entry.bytes();
        entry.changed.send_replace(());
        self.shrink(limits);
        Some(result)
    }

    fn shrink(&mut self, limits: StoreLimits) {
        while self.by_key.len() > limits.responses || self.bytes > limits.bytes {
            let Some((_, key)) = self.order.pop_first() else { break };
            self.forget(&key);
        }
    }
}

/// The outcome of a cancellation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cancelled {
    /// The response is cancelled; its body.
    Now(Bytes),
    /// The response had ended before.
    TooLate,
    Unknown,
}

impl ResponseStore {
    pub(crate) fn new(limits: StoreLimits) -> Self {
        Self { limits, entries: Mutex::default() }
    }

    /// The JSON of a response.
    pub(crate) fn body(&self, owner: ClientId, id: &str) -> Option<Bytes> {
        Some(lock(&self.entries).by_key.get(&(owner, id.to_owned()))?.body.clone())
    }

    /// The messages up to and including a response, without instructions, and whether the response has ended.
    pub(crate) fn conversation(&self, owner: ClientId, id: &str) -> Option<(Vec<Value>, bool)> {
        let (json, ended) = {
            let entries = lock(&self.entries);
            let entry = entries.by_key.get(&(owner, id.to_owned()))?;
            (entry.conversation.clone(), entry.ended)
        };
        Some((serde_json::from_slice(&json).unwrap_or_default(), ended))
    }

    /// Forgets a response, and aborts it if it runs. Returns whether there was one.
    pub(crate) fn delete(&self, owner: ClientId, id: &str) -> bool {
        let key = (owner, id.to_owned());
        let mut entries = lock(&self.entries);
        let known = entries.by_key.contains_key(&key);
        entries.forget(&key);
        known
    }

    /// Aborts a response that runs in the background.
    pub(crate) fn cancel(&self, owner: ClientId, id: &str) -> Cancelled {
        let key = (owner, id.to_owned());
        let mut entries = lock(&self.entries);
        let Some(entry) = entries.by_key.get(&key) else { return Cancelled::Unknown };
        if entry.ended {
            return Cancelled::TooLate;
        }
        let number = entry.number;
        let cancelled = entries.change(&key, number, self.limits, |entry| {
            let mut body: Value = serde_json::from_slice(&entry.body).unwrap_or_default();
            body["status"] = "cancelled".into();
            entry.body = json(&body);
            entry.ended = true;
            if let Some(task) = entry.task.take() {
                task.abort();
            }
            entry.body.clone()
        });
        cancelled.map_or(Cancelled::Unknown, Cancelled::Now)
    }

    /// The events of a background stream from number `from` on, those that are still to come included. `None` if the
    /// response is unknown or has no events.
    pub(crate) fn follow(
        self: &Arc<Self>,
        owner: ClientId,
        id: &str,
        from: usize,
    ) -> Option<impl Stream<Item = Result<Bytes, Infallible>> + use<>> {
        let key = (owner, id.to_owned());
        let changed = {
            let entries = lock(&self.entries);
            let entry = entries.by_key.get(&key)?;
            entry.events.as_ref()?;
            entry.changed.subscribe()
        };
        let state = (Arc::clone(self), key, changed, from);
        Some(unfold(state, |(store, key, mut changed, from)| async move {
            loop {
                changed.mark_unchanged();
                let (new, ended) = store.events(&key, from)?;
                if !new.is_empty() {
                    let next = from + new.len();
                    return Some((Ok(Bytes::from(new.concat())), (store, key, changed, next)));
                }
                if ended || changed.changed().await.is_err() {
                    return None;
                }
            }
        }))
    }

    /// The events from number `from` on, and whether they are the last.
    fn events(&self, key: &Key, from: usize) -> Option<(Vec<Bytes>, bool)> {
        let entries = lock(&self.entries);
        let entry = entries.by_key.get(key)?;
        let events = entry.events.as_deref()?;
        Some((events.get(from..).unwrap_or_default().to_vec(), entry.ended))
    }
}

/// Writes one response into the store.
#[derive(Debug)]
pub(crate) struct Recorder {
    store: Arc<ResponseStore>,
    key: Key,
    /// The messages of the request, without instructions.
    conversation: Vec<Value>,
    /// The number of the entry, if the response runs in the background.
    number: Option<u64>,
}

impl Recorder {
    pub(crate) fn new(store: Arc<ResponseStore>, owner: ClientId, id: &str, conversation: Vec<Value>) -> Self {
        Self { store, key: (owner, id.to_owned()), conversation, number: None }
    }

    pub(crate) fn owner(&self) -> ClientId {
        self.key.0
    }

    /// Stores a response that is about to run in the background.
    pub(crate) fn begin(&mut self, body: &Value, streamed: bool) -> Ticket {
        let number = self.insert(body, Some(streamed));
        self.number = Some(number);
        Ticket { store: Arc::clone(&self.store), key: self.key.clone(), number }
    }

    /// Stores the state of a response that runs in the background.
    pub(crate) fn progress(&self, body: &Value) {
        if let Some(number) = self.number {
            let body = json(body);
            self.change(number, |entry| entry.body = body);
        }
    }

    /// Stores a response that has ended.
    pub(crate) fn finish(&mut self, body: &Value) {
        for item in body["output"].as_array().into_iter().flatten() {
            if let Err(error) = add_item(&mut self.conversation, item) {
                tracing::error!(%error, "an output item cannot be continued");
            }
        }
        match self.number {
            None => {
                self.insert(body, None);
            }
            Some(number) => {
                let (body, conversation) = (json(body), json(&self.conversation));
                self.change(number, |entry| {
                    (entry.body, entry.conversation) = (body, conversation);
                    // The last events of a stream are still to come.
                    entry.ended = entry.events.is_none();
                });
            }
        }
    }

    /// Adds an entry, which has ended unless it runs in the background; `background` tells whether it is streamed there.
    fn insert(&self, body: &Value, background: Option<bool>) -> u64 {
        let (body, conversation) = (json(body), json(&self.conversation));
        let mut entries = lock(&self.store.entries);
        let number = entries.next;
        entries.next += 1;
        let entry = Entry {
            number,
            body,
            conversation,
            events: (background == Some(true)).then(Vec::new),
            ended: background.is_none(),
            changed: watch::Sender::new(()),
            task: None,
        };
        entries.insert(self.key.clone(), entry, self.store.limits);
        number
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut Entry)) {
        let open = |entry: &mut Entry| {
            if !entry.ended {
                change(entry);
            }
        };
        lock(&self.store.entries).change(&self.key, number, self.store.limits, open);
    }
}

/// The task of a response that runs in the background.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    store: Arc<ResponseStore>,
    key: Key,
    number: u64,
}

impl Ticket {
    /// Stores the events of a frame.
    pub(crate) fn push(&self, frame: &Bytes) {
        let mut events = vec![];
        let mut start = 0;
        for end in frame.windows(2).enumerate().filter_map(|(at, pair)| (pair == b"\n\n").then_some(at + 2)) {
            events.push(Bytes::copy_from_slice(&frame[start..end]));
            start = end;
        }
        self.change(|entry| {
            if let Some(stored) = &mut entry.events {
                stored.extend(events);
            }
        });
    }

    /// Lets the response be cancelled, unless it is forgotten, which aborts the task.
    pub(crate) fn attach(&self, task: &AbortHandle) {
        if self.change(|entry| entry.task = Some(task.clone())).is_none() {
            task.abort();
        }
    }

    /// Records that the task has ended.
    pub(crate) fn end(&self) {
        self.change(|entry| entry.ended = true);
    }

    fn change(&self, change: impl FnOnce(&mut Entry)) -> Option<()> {
        lock(&self.store.entries).change(&self.key, self.number, self.store.limits, change)
    }
}

fn json<T: serde::Serialize>(value: &T) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn store(responses: usize, bytes: usize) -> Arc<ResponseStore> {
        Arc::new(ResponseStore::new(StoreLimits { responses, bytes }))
    }

    fn put(store: &Arc<ResponseStore>, owner: ClientId, id: &str, text: &str) {
        let body = json!({"id": id, "output": [{"type": "message", "role": "assistant", "content": text}]});
        Recorder::new(Arc::clone(store), owner, id, vec![]).finish(&body);
    }

    #[test]
    fn a_response_is_found_only_by_its_owner() {
        let store = store(10, 1 << 20);
        let [a, b, other] = [1, 2, 3].map(ClientId);
        put(&store, a, "resp_1", "of a");
        put(&store, b, "resp_1", "of b");
        for (owner, text) in [(a, "of a"), (b, "of b")] {
            assert!(String::from_utf8(store.body(owner, "resp_1").unwrap().to_vec()).unwrap().contains(text));
        }
        assert_eq!(store.body(other, "resp_1"), None);
        assert_eq!(store.cancel(other, "resp_1"), Cancelled::Unknown);
    }

    #[test]
    fn the_oldest_goes_first_by_number_and_by_size() {
        let me = ClientId(1);
        let by_number = store(3, usize::MAX);
        for id in ["1", "2", "3", "4"] {
            put(&by_number, me, id, "x");
        }
        let known = |store: &ResponseStore| ["1", "2", "3", "4"].map(|id| store.body(me, id).is_some());
        assert_eq!(known(&by_number), [false, true, true, true]);
        put(&by_number, me, "2", "again");
        put(&by_number, me, "5", "x");
        assert_eq!(known(&by_number), [false, true, false, true], "a new response of an old id is new");

        let by_size = store(100, 50_000);
        for id in ["1", "2", "3", "4"] {
            put(&by_size, me, id, &"x".repeat(10_000));
        }
        assert_eq!(known(&by_size), [false, false, true, true], "body and conversation both count");
        put(&by_size, me, "5", &"x".repeat(100_000));
        assert_eq!((known(&by_size), by_size.body(me, "5")), ([false; 4], None), "one that is too large is not kept");
        let entries = lock(&by_size.entries);
        assert_eq!((entries.bytes, entries.order.len(), entries.by_key.len()), (0, 0, 0));
    }
}
