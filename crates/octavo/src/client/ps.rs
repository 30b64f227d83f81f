//! `octavo ps`: the models and the load of a running server.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::cli::PsArgs;
use crate::client::connection::{Client, root_of};
use crate::client::{block_on, certificates};
use crate::table::aligned;

/// Longest that the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Prints a line for each model of a server.
///
/// # Errors
/// The server does not answer, or its answer is not JSON.
pub(crate) fn ps(args: &PsArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let answers = block_on(async {
        let mut client = Client::at(&args.url, args.api_key.as_deref(), &certificates(args.insecure))?;
        let ask = async {
            let models = client.get("/v1/models").await?;
            let metrics = client.get("/metrics").await?;
            Ok::<_, anyhow::Error>((models, metrics))
        };
        match tokio::time::timeout(PATIENCE, ask).await {
            Ok(answers) => answers.map_err(|error| {
                let told = crate::report::sentence(&error);
                anyhow!("{told}; `octavo serve` starts a server, and --url names another one")
            }),
            Err(_) => bail!("{} does not answer within {} s", args.url, PATIENCE.as_secs()),
        }
    });
    let (models, metrics) = answers?;
    let models: Value = serde_json::from_slice(&models).with_context(|| format!("{} is no server", args.url))?;
    print!("{}", table(root_of(&args.url), &models, &String::from_utf8_lossy(&metrics)));
    Ok(())
}

/// A row for each model; the numbers of requests are the server's.
fn table(url: &str, models: &Value, metrics: &str) -> String {
    let count = |name| sum(metrics, name).map_or_else(|| "-".to_owned(), |count| format!("{count:.0}"));
    let (running, waiting) = (count("vllm:num_requests_running"), count("vllm:num_requests_waiting"));
    let kv = sum(metrics, "vllm:kv_cache_usage_perc").map(|share| format!("{:.1} %", share * 100.0));
    let kv = match (kv, label(metrics, "vllm:cache_config_info", "kv_cache_size_tokens")) {
        (Some(share), Some(tokens)) => format!("{share} of {tokens} tokens"),
        (share, _) => share.unwrap_or_else(|| "-".to_owned()),
    };
    let rows = models["data"].as_array().into_iter().flatten().map(|model| {
        let name = model["id"].as_str().unwrap_or("-").to_owned();
        let context = model["max_model_len"].as_u64().map_or_else(|| "-".to_owned(), |tokens| tokens.to_string());
        [name, context, running.clone(), waiting.clone(), kv.clone(), url.to_owned()]
    });
    let heading = ["MODEL", "CONTEXT", "RUNNING", "WAITING", "KV CACHE", "URL"].map(str::to_owned);
    aligned(&std::iter::once(heading).chain(rows).collect::<Vec<_>>())
}

/// The series of a metric.
fn series<'a>(metrics: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    metrics.lines().filter(move |line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
}

/// The sum of a metric's series; `None` if there is none.
fn sum(metrics: &str, name: &str) -> Option<f64> {
    series(metrics, name).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).reduce(|a, b| a + b)
}

fn label<'a>(metrics: &'a str, name: &'a str, label: &str) -> Option<&'a str> {
    let line = series(metrics, name).next()?;
    line.split_once(&format!("{label}=\""))?.1.split('"').next()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_server_is_a_row_for_each_name() {
        let metrics = "# TYPE vllm:num_requests_running gauge\n\
                       vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
                       vllm:num_requests_running_total 9\n\
                       vllm:num_requests_waiting 0\n\
                       vllm:kv_cache_usage_perc{engine=\"0\"} 0.125\n\
                       vllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"4096\"} 1\n";
        let models = json!({"data": [{"id": "m", "max_model_len": 8192}, {"id": "alias"}]});
        let text = table("http://h:1", &models, metrics);
        let expected = "MODEL  CONTEXT  RUNNING  WAITING  KV CACHE               URL\n\
                        m      8192     3        0        12.5 % of 4096 tokens  http://h:1\n\
                        alias  -        3        0        12.5 % of 4096 tokens  http://h:1\n";
        assert_eq!(text, expected);
        assert!(table("u", &models, "").contains("m      8192     -        -        -"), "a server without metrics");
    }
}
