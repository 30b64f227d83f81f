//! Options of resolving a model, from the environment.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Options and folders of [`resolve`](crate::resolve()). [`ResolveOptions::from_env`] reads the variables of Hugging
/// Face's own clients, so that a deployment need not set them twice.
#[derive(Clone, Debug)]
pub struct ResolveOptions {
    /// Branch, tag or commit of a hub repository; `None` uses the catalog's, else `main`.
    pub revision: Option<String>,
    /// Uses only files on this machine.
    pub offline: bool,
    /// Asks the hub whether a model in the cache has changed. Otherwise a complete copy in the cache is used without a
    /// network, so the served model changes only after a pull.
    pub refresh: bool,
    /// Refuses a model of the hub whose architecture is not served, before its weights are downloaded.
    pub require_served: bool,
    /// Omits the weights of a Hugging Face directory, because dummy weights replace them.
    pub without_weights: bool,
    /// Octavo's own cache (`OCTAVO_CACHE`, else `octavo` under `HF_HOME`, `XDG_CACHE_HOME` or `~/.cache`).
    pub cache_dir: PathBuf,
    /// Command that runs pip; `None` searches for it.
    pub pip: Option<Vec<OsString>>,
    /// Options of the Hugging Face hub.
    pub hub: HubOptions,
}

/// Connection to the Hugging Face hub, and the folder of its files.
#[derive(Clone)]
pub struct HubOptions {
    /// The cache shared with the Python clients (`HF_HUB_CACHE`, else `hub` under `HF_HOME`).
    pub cache_dir: PathBuf,
    /// Base URL of the hub (`HF_ENDPOINT`), without a final slash. It may have a path.
    pub endpoint: String,
    /// Access token (`HF_TOKEN`, else the file that `hf auth login` writes).
    pub token: Option<String>,
    /// PEM file of certificate authorities (`SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`), which replaces
    /// Mozilla's.
    pub ca_file: Option<PathBuf>,
    /// Retries after transient errors.
    pub retry: Retry,
}

impl std::fmt::Debug for HubOptions {
    /// Omits the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache_dir", &self.cache_dir)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("ca_file", &self.ca_file)
            .field("retry", &self.retry)
            .finish()
    }
}

/// Retries of server errors, timeouts and cut connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Number of attempts without progress before giving up; at least 1.
    pub attempts: u32,
    /// Pause before the second attempt; doubles after each.
    pub first_delay: Duration,
    /// Maximum pause.
    pub longest_delay: Duration,
    /// Timeout of establishing a connection.
    pub connect_timeout: Duration,
    /// Maximum time without a received byte.
    pub read_timeout: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 5,
            first_delay: Duration::from_millis(500),
            longest_delay: Duration::from_secs(8),
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
        }
    }
}

impl Retry {
    /// Returns the pause before the attempt after `failures` failed ones.
    pub(crate) fn delay(&self, failures: u32) -> Duration {
        let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first_delay.saturating_mul(factor).min(self.longest_delay)
    }
}

/// Default URL of the hub.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

impl Default for ResolveOptions {
    fn default() -> Self {
        Self::from_env()
    }
}

impl ResolveOptions {
    /// Reads the options from the environment of the process.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the options from the variables that `variable` returns. Empty ones count as unset.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let path = |name: &str| variable(name).map(PathBuf::from);

        let home = path("HOME").or_else(|| path("USERPROFILE")).unwrap_or_else(std::env::temp_dir);
        let caches = path("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache"));
        let hf_home = path("HF_HOME");
        let cache_dir = path("OCTAVO_CACHE")
            .or_else(|| hf_home.as_ref().map(|hf_home| hf_home.join("octavo")))
            .unwrap_or_else(|| caches.join("octavo"));
        let hf_home = hf_home.unwrap_or_else(|| caches.join("huggingface"));
        let hub_cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token"));
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let ca_file = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"].into_iter().find_map(path);
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().filter_map(text).any(|v| is_true(&v));
        Self {
            revision: None,
            offline,
            refresh: false,
            require_served: false,
            without_weights: false,
            cache_dir,
            pip: None,
            hub: HubOptions {
                cache_dir: hub_cache.unwrap_or_else(|| hf_home.join("hub")),
                endpoint: endpoint.trim_end_matches('/').to_owned(),
                token: token.map(|token| token.trim().to_owned()).or_else(|| read_token(&token_file)),
                ca_file,
                retry: Retry::default(),
            },
        }
    }
}

fn read_token(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|token| !token.is_empty())
}

/// Parses a switch as Hugging Face's Python client does.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> ResolveOptions {
        ResolveOptions::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn caches_follow_hf_home_then_xdg_then_home() {
        let plain = options(&[("HOME", "/h")]);
        assert_eq!(plain.cache_dir, Path::new("/h/.cache/octavo"));
        assert_eq!(plain.hub.cache_dir, Path::new("/h/.cache/huggingface/hub"));

        let xdg = options(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]);
        assert_eq!(xdg.cache_dir, Path::new("/x/octavo"));
        assert_eq!(xdg.hub.cache_dir, Path::new("/x/huggingface/hub"));

        let hf = options(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/hf")]);
        assert_eq!(hf.cache_dir, Path::new("/hf/octavo"));
        assert_eq!(hf.hub.cache_dir, Path::new("/hf/hub"));

        let all = options(&[("HF_HOME", "/hf"), ("OCTAVO_CACHE", "/o"), ("HF_HUB_CACHE", "/models")]);
        assert_eq!(all.cache_dir, Path::new("/o"));
        assert_eq!(all.hub.cache_dir, Path::new("/models"));
    }

    #[test]
    fn empty_variables_are_unset_and_the_endpoint_loses_its_slash() {
        let some = options(&[("HOME", "/h"), ("HF_HOME", ""), ("HF_ENDPOINT", "http://mirror/hub/"), ("HF_TOKEN", "")]);
        assert_eq!(some.hub.cache_dir, Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(some.hub.endpoint, "http://mirror/hub");
        assert_eq!(some.hub.token, None);
        assert_eq!(options(&[]).hub.endpoint, "https://huggingface.co");
    }

    #[test]
    fn offline_is_read_as_the_python_client_reads_it() {
        for (value, expected) in [("1", true), ("True", true), ("yes", true), ("0", false), ("", false), ("no", false)]
        {
            assert_eq!(options(&[("HF_HUB_OFFLINE", value)]).offline, expected, "{value:?}");
        }
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file_and_is_never_printed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "from-file\n").unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(options(&[("HF_HOME", home)]).hub.token.as_deref(), Some("from-file"));
        let both = options(&[("HF_HOME", home), ("HF_TOKEN", "from-variable")]);
        assert_eq!(both.hub.token.as_deref(), Some("from-variable"));
        assert!(!format!("{both:?}").contains("from-variable"));
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let retry = Retry::default();
        let delays: Vec<u128> = (1..8).map(|failures| retry.delay(failures).as_millis()).collect();
        assert_eq!(delays, [500, 1000, 2000, 4000, 8000, 8000, 8000]);
        assert_eq!(retry.delay(u32::MAX), retry.longest_delay);
    }
}
