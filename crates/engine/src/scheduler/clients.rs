//! The clients that have requests, and the service that each has received.

use std::collections::HashMap;

use crate::ClientId;

/// A client that has requests.
#[derive(Clone, Copy, Debug, Default)]
struct Client {
    /// Service received, in estimated seconds, or in tokens without a cost model.
    served: f64,
    /// Number of its sequences, running and waiting.
    sequences: usize,
    /// Number of its running sequences.
    running: usize,
}

/// Clients with requests. The fair policy serves the client first that has received the least service.
///
/// A client that returns starts at the least service of all others, so that it cannot save up service while it is away.
#[derive(Debug, Default)]
pub(super) struct Clients(HashMap<ClientId, Client>);

impl Clients {
    /// Counts a new sequence.
    pub(super) fn enter(&mut self, client: ClientId) {
        let least = self.0.values().map(|client| client.served).min_by(f64::total_cmp).unwrap_or(0.0);
        let client = self.0.entry(client).or_insert(Client { served: least, ..Client::default() });
        client.sequences += 1;
    }

    /// Counts out a sequence that does not run.
    pub(super) fn leave(&mut self, client: ClientId) {
        if let Some(entry) = self.0.get_mut(&client) {
            entry.sequences -= 1;
            if entry.sequences == 0 {
                self.0.remove(&client);
            }
        }
    }

    /// Counts a sequence that begins to run.
    pub(super) fn start(&mut self, client: ClientId) {
        if let Some(client) = self.0.get_mut(&client) {
            client.running += 1;
        }
    }

    /// Counts a sequence that no longer runs.
    pub(super) fn stop(&mut self, client: ClientId) {
        if let Some(client) = self.0.get_mut(&client) {
            client.running -= 1;
        }
    }

    /// Adds to the service of a client.
    pub(super) fn charge(&mut self, client: ClientId, service: f64) {
        if let Some(client) = self.0.get_mut(&client) {
            client.served += service;
        }
    }

    /// Returns the rank of a client: smaller is served earlier.
    pub(super) fn rank(&self, client: ClientId) -> u64 {
        // The bits of floating-point numbers that are not negative are in the order of the numbers.
        self.0.get(&client).map_or(0, |client| client.served.to_bits())
    }

    /// Returns the rank of a client's waiting sequences: of clients with equal service, the one that runs less comes
    /// first.
    pub(super) fn claim(&self, client: ClientId) -> (u64, usize) {
        (self.rank(client), self.0.get(&client).map_or(0, |client| client.running))
    }

    /// Returns the client that runs the most sequences, if that is at least two more than `client` runs: it still runs
    /// no fewer after one of them has made way.
    pub(super) fn must_yield_to(&self, client: ClientId) -> Option<ClientId> {
        let running = self.0.get(&client).map_or(0, |client| client.running);
        let most = self.0.iter().max_by_key(|&(id, client)| (client.running, id));
        most.filter(|(_, most)| most.running > running + 1).map(|(&id, _)| id)
    }

    /// Returns the number of running sequences and of all sequences.
    pub(super) fn counts(&self) -> (usize, usize) {
        self.0.values().fold((0, 0), |(running, all), client| (running + client.running, all + client.sequences))
    }
}
