//! Settings from the environment.

use std::env;
use std::path::{Path, PathBuf};

use super::rows::Row;
use super::servers::Server;

/// Settings of a run.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// Path of Octavo's binary.
    pub(super) octavo: PathBuf,
    /// Folder of the peers and the models.
    pub(super) peers: PathBuf,
    /// Number of rounds.
    pub(super) rounds: usize,
    /// Flags of llama-server, as alternatives.
    pub(super) llama: Vec<String>,
    pub(super) only: Only,
    /// Number of threads that a server may use.
    pub(super) threads: usize,
}

/// Restrictions of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Only {
    pub(super) rows: Vec<Row>,
    pub(super) servers: Vec<Server>,
}

impl Settings {
    /// Reads the settings; `None` without `PEERS_DIR`.
    pub(super) fn from_env(octavo: &Path) -> Result<Option<Self>, String> {
        let Some(peers) = env::var_os("PEERS_DIR").map(PathBuf::from) else { return Ok(None) };
        if !peers.join("models").is_dir() {
            return Err(format!("PEERS_DIR: there is no folder {}", peers.join("models").display()));
        }
        let text = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
        Ok(Some(Self {
            octavo: octavo.to_owned(),
            peers,
            rounds: text("OCTAVO_PEERS_ROUNDS").map_or(Ok(3), |text| rounds(&text))?,
            llama: alternatives(&text("OCTAVO_PEERS_LLAMA").unwrap_or_else(|| "-fa off".into())),
            only: Only::parse(&text("OCTAVO_PEERS_ONLY").unwrap_or_default())?,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }))
    }
}

fn rounds(text: &str) -> Result<usize, String> {
    let rounds = text.trim().parse().ok().filter(|&rounds| rounds > 0);
    rounds.ok_or_else(|| format!("OCTAVO_PEERS_ROUNDS: '{text}' is no number above 0"))
}

fn alternatives(text: &str) -> Vec<String> {
    text.split(';').map(|flags| flags.trim().to_owned()).collect()
}

impl Only {
    /// Parses names of rows and servers, separated by commas. Without names of rows all rows are included, and likewise
    /// for servers.
    fn parse(text: &str) -> Result<Self, String> {
        let (mut rows, mut servers) = (Vec::new(), Vec::new());
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let row = Row::ALL.into_iter().find(|row| row.name() == name);
            match (row, Server::ALL.into_iter().find(|server| server.name() == name)) {
                (Some(row), _) => rows.push(row),
                (None, Some(server)) => servers.push(server),
                (None, None) => return Err(format!("OCTAVO_PEERS_ONLY: '{name}' is none of {}", known().join(", "))),
            }
        }
        if rows.is_empty() {
            rows.extend(Row::ALL);
        }
        if servers.is_empty() {
            servers.extend(Server::ALL);
        }
        Ok(Self { rows, servers })
    }
}

fn known() -> Vec<String> {
    Row::ALL.into_iter().map(Row::name).chain(Server::ALL.map(|server| server.name().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_restricted_by_names() {
        let all = Only::parse("").unwrap();
        assert_eq!((all.rows.len(), all.servers.len()), (Row::ALL.len(), Server::ALL.len()));
        let some = Only::parse("prefill, stack-64 ,octavo").unwrap();
        assert_eq!(some, Only { rows: vec![Row::Prefill, Row::Stack(64)], servers: vec![Server::Octavo] });
        assert_eq!(Only::parse("llama-server").unwrap().rows, Row::ALL);
        let error = Only::parse("prefil").unwrap_err();
        assert!(error.contains("'prefil'") && error.contains("prefill") && error.contains("vllm-cpu"), "{error}");
    }

    #[test]
    fn numbers_and_alternatives_are_read() {
        assert_eq!(rounds(" 5 "), Ok(5));
        assert!(rounds("0").is_err() && rounds("many").is_err());
        assert_eq!(alternatives("-fa off; -fa on"), ["-fa off", "-fa on"]);
    }
}
