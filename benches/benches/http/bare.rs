//! A lower bound for any HTTP stack: over the same engine, one write of prepared bytes for each token, without any
//! parsing.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use octavo_engine::{EngineHandle, Request, SamplingParams, Task};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::{OUTPUT_TOKENS, PROMPT_WORDS};

const HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

/// An event as the server writes it for a token: with the same length and the same fields.
const EVENT: &str = "data: {\"id\":\"cmpl-00000000000000000000000000000000\",\"object\":\"text_completion\",\"created\":1700000000,\
    \"model\":\"bench\",\"choices\":[{\"index\":0,\"text\":\" ab\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}]}\n\n";

/// Answers every request on every connection.
pub(crate) async fn serve(listener: TcpListener, engine: EngineHandle) -> io::Result<()> {
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        tokio::spawn(connection(socket, engine.clone()));
    }
}

async fn connection(mut socket: TcpStream, engine: EngineHandle) -> io::Result<()> {
    let event = chunk(EVENT);
    let usage = format!(
        "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":{PROMPT_WORDS},\"completion_tokens\":{OUTPUT_TOKENS},\
         \"total_tokens\":0}}}}\n\ndata: [DONE]\n\n"
    );
    let end = [chunk(&usage), b"0\r\n\r\n".to_vec()].concat();
    let mut buffer = vec![0; 4096];
    loop {
        // The load's requests fit one segment, and a client waits for the answer before it sends the next.
        if socket.read(&mut buffer).await? == 0 {
            return Ok(());
        }
        let request = Request {
            id: String::new(),
            prompt: (256..256 + PROMPT_WORDS as u32).collect(),
            task: Task::Generate,
            params: Arc::new(SamplingParams { max_tokens: OUTPUT_TOKENS, ..SamplingParams::default() }),
            priority: 0,
            client: octavo_engine::ClientId::default(),
            arrival: Instant::now(),
            cache_salt: None,
            adapter: None,
            constraint: None,
            images: Arc::default(),
            second_text: None,
            parent_n: None,
        };
        let mut tokens = engine.submit(request).map_err(io::Error::other)?;
        socket.write_all(HEAD).await?;
        while let Some(output) = tokens.next().await {
            for _ in &output.tokens {
                socket.write_all(&event).await?;
            }
        }
        socket.write_all(&end).await?;
    }
}

/// Formats a chunk of a chunked body.
fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}
