//! API keys: those of flags, and those of a file with names and limits.
//!
//! Keys are kept and looked up as SHA-256 hashes, so the time of a comparison tells nothing of a key. A key that is
//! random, as it should be, needs no slower hash.

mod account;
mod bucket;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use octavo_telemetry::Telemetry;
use sha2::{Digest, Sha256};

pub use account::KeyLimits;
pub(crate) use account::{Account, Meter};

/// The SHA-256 hash of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// The hash of a key.
    pub fn new(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }

    /// A hash from its 64 hexadecimal digits; `None` if the text is anything else.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
        let (pairs, []) = digits.as_chunks::<2>() else { return None };
        let bytes: Vec<u8> = pairs.iter().map(|[high, low]| ((high << 4) | low) as u8).collect();
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({self})")
    }
}

/// A named client of the keys file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyEntry {
    /// The name in metrics, logs and messages, unique in the file. It identifies the client across reloads.
    pub name: String,
    /// The hashes of its keys. There may be several while a key is replaced.
    pub hashes: Vec<KeyHash>,
    /// Its limits, which all of its keys share.
    pub limits: KeyLimits,
    /// The smallest priority, which is the most urgent, that its requests may have.
    pub min_priority: Option<i64>,
}

/// The client that a key belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyId {
    /// The entry of the file with this name.
    Named(Arc<str>),
    /// The flag's key of this index.
    Numbered(usize),
}

/// What is known of a request whose key was accepted.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    pub(crate) id: KeyId,
    /// Whether there are other clients with keys.
    pub(crate) several: bool,
    pub(crate) min_priority: Option<i64>,
    /// `None` for a key without a name.
    pub(crate) account: Option<Arc<Account>>,
}

/// The accepted keys; clones share them.
#[derive(Clone)]
pub struct ApiKeys(Arc<Inner>);

struct Inner {
    telemetry: Telemetry,
    /// The keys of flags, which a reload keeps.
    numbered: Vec<KeyHash>,
    /// Whether requests need a key. A reload does not change it, so no file opens a server.
    required: bool,
    current: RwLock<Arc<Ring>>,
}

/// The keys at one time.
#[derive(Debug, Default)]
struct Ring {
    holders: HashMap<KeyHash, Holder>,
    accounts: HashMap<Arc<str>, Arc<Account>>,
    /// Number of clients.
    clients: usize,
}

#[derive(Clone, Debug)]
enum Holder {
    Numbered(usize),
    Named { account: Arc<Account>, min_priority: Option<i64> },
}

impl ApiKeys {
    /// The keys of flags, of which empty ones are ignored, and those of a file.
    pub(crate) fn new(telemetry: Telemetry, numbered: &[String], entries: &[KeyEntry]) -> Self {
        let keys = numbered.iter().filter(|key| !key.is_empty());
        let numbered: Vec<_> = keys.map(|key| KeyHash::new(key.as_bytes())).collect();
        let required = !numbered.is_empty() || !entries.is_empty();
        let keys = Self(Arc::new(Inner { telemetry, numbered, required, current: RwLock::default() }));
        keys.replace(entries);
        keys
    }

    /// Replaces the keys of the file. A client whose name remains keeps what it has used, and its running requests.
    pub fn replace(&self, entries: &[KeyEntry]) {
        let (inner, now) = (&*self.0, Instant::now());
        let mut current = inner.current.write().unwrap_or_else(PoisonError::into_inner);
        let numbered = inner.numbered.iter().enumerate().map(|(index, &hash)| (hash, Holder::Numbered(index)));
        let mut ring = Ring { holders: numbered.collect(), ..Ring::default() };
        for KeyEntry { name, hashes, limits, min_priority } in entries {
            let account = match current.accounts.get(name.as_str()) {
                Some(known) => {
                    known.limit(*limits, now);
                    Arc::clone(known)
                }
                None => Arc::new(Account::new(name, inner.telemetry.key(name), *limits, now)),
            };
            // A flag's key that is in the file as well has the limits of the file.
            let holder = Holder::Named { account: Arc::clone(&account), min_priority: *min_priority };
            ring.holders.extend(hashes.iter().map(|&hash| (hash, holder.clone())));
            ring.accounts.insert(Arc::clone(account.name()), account);
        }
        let numbered = ring.holders.values().filter(|holder| matches!(holder, Holder::Numbered(_))).count();
        ring.clients = ring.accounts.len() + numbered;
        *current = Arc::new(ring);
    }

    /// Whether requests need a key.
    pub(crate) fn required(&self) -> bool {
        self.0.required
    }

    /// The client that a key belongs to.
    pub(crate) fn find(&self, key: &[u8]) -> Option<Accepted> {
        let ring = Arc::clone(&self.0.current.read().unwrap_or_else(PoisonError::into_inner));
        let (id, min_priority, account) = match ring.holders.get(&KeyHash::new(key))? {
            Holder::Numbered(index) => (KeyId::Numbered(*index), None, None),
            Holder::Named { account, min_priority } => {
                (KeyId::Named(Arc::clone(account.name())), *min_priority, Some(Arc::clone(account)))
            }
        };
        Some(Accepted { id, several: ring.clients > 1, min_priority, account })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::num::NonZeroU32;

    use octavo_telemetry::TelemetryConfig;

    use super::*;

    /// Keys of flags and of a file.
    pub(crate) fn keys(numbered: &[&str], entries: &[KeyEntry]) -> ApiKeys {
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 8 });
        let numbered: Vec<String> = numbered.iter().map(|&key| key.to_owned()).collect();
        ApiKeys::new(telemetry, &numbered, entries)
    }

    /// An entry with a limit of requests.
    pub(crate) fn entry(name: &str, keys: &[&str], requests_per_minute: u32) -> KeyEntry {
        let limits = KeyLimits { requests_per_minute: NonZeroU32::new(requests_per_minute), ..KeyLimits::default() };
        let hashes = keys.iter().map(|key| KeyHash::new(key.as_bytes())).collect();
        KeyEntry { name: name.into(), hashes, limits, min_priority: None }
    }

    fn name(keys: &ApiKeys, key: &str) -> Option<KeyId> {
        keys.find(key.as_bytes()).map(|accepted| accepted.id)
    }

    #[test]
    fn a_hash_has_64_digits() {
        let hash = KeyHash::new(b"abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash.to_string(), text);
        assert_eq!(KeyHash::from_hex(text), Some(hash));
        assert_eq!(KeyHash::from_hex(&text.to_uppercase()), Some(hash));
        for wrong in ["", "ba", &text[1..], &format!("{text}0"), &format!("{text}00"), &text.replace('b', "g")] {
            assert_eq!(KeyHash::from_hex(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn keys_of_both_kinds_identify_their_clients() {
        let keys = keys(&["flag", "", "both"], &[entry("a", &["old", "new"], 0), entry("b", &["both"], 0)]);
        assert_eq!(name(&keys, "flag"), Some(KeyId::Numbered(0)));
        assert_eq!(name(&keys, "old"), Some(KeyId::Named("a".into())));
        assert_eq!(name(&keys, "new"), Some(KeyId::Named("a".into())));
        assert_eq!(name(&keys, "both"), Some(KeyId::Named("b".into())));
        assert_eq!((name(&keys, ""), name(&keys, "other")), (None, None));
        assert!(keys.required() && keys.find(b"flag").unwrap().several);
    }

    #[test]
    fn only_several_clients_are_several() {
        for (numbered, entries, several) in [
            (&["k"][..], vec![], false),
            (&["k", "l"], vec![], true),
            (&[], vec![entry("a", &["k", "l"], 0)], false),
            (&["k"], vec![entry("a", &["k"], 0)], false),
            (&["k"], vec![entry("a", &["l"], 0)], true),
        ] {
            assert_eq!(keys(numbered, &entries).find(b"k").unwrap().several, several, "{numbered:?} {entries:?}");
        }
    }

    #[test]
    fn a_reload_replaces_keys_and_keeps_usage() {
        let keys = keys(&["flag"], &[entry("a", &["one"], 1), entry("b", &["two"], 1)]);
        let account = keys.find(b"one").unwrap().account.unwrap();
        drop(account.admit(Instant::now()).unwrap());
        keys.replace(&[entry("a", &["three"], 1)]);
        assert_eq!((name(&keys, "one"), name(&keys, "two")), (None, None));
        assert_eq!(name(&keys, "flag"), Some(KeyId::Numbered(0)));
        let after = keys.find(b"three").unwrap().account.unwrap();
        assert!(Arc::ptr_eq(&account, &after) && after.admit(Instant::now()).is_err());
    }

    #[test]
    fn no_reload_opens_a_server() {
        let keys = keys(&[], &[entry("a", &["one"], 0)]);
        keys.replace(&[]);
        assert!(keys.required() && keys.find(b"one").is_none());
        assert!(!super::tests::keys(&[], &[]).required());
    }
}
