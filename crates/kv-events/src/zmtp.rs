//! The part of ZMTP 3.1 that two kinds of sockets need: no security mechanism, short and long frames, subscriptions as
//! commands (3.1) and as messages (3.0), and answers to heartbeats.

use std::io::{Error, ErrorKind, Result};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Length of the greeting in bytes.
const GREETING: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Maximum length of a frame from a peer, in bytes: subscriptions and sequence numbers are short.
const MAX_FRAME: u64 = 64 << 10;

/// Socket type of our end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketKind {
    Publish,
    Route,
}

impl SocketKind {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Publish => b"PUB",
            Self::Route => b"ROUTER",
        }
    }

    fn peers(self) -> [&'static [u8]; 2] {
        match self {
            Self::Publish => [b"SUB", b"XSUB"],
            Self::Route => [b"REQ", b"DEALER"],
        }
    }
}

/// A frame from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) command: bool,
    /// Whether more frames of the same message follow.
    pub(crate) more: bool,
    pub(crate) body: Bytes,
}

/// Exchanges greetings with a peer and checks that the socket types are compatible.
///
/// # Errors
/// Returns an error if the connection ends, the peer speaks another protocol, or its socket type is incompatible.
pub(crate) async fn handshake(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), kind: SocketKind) -> Result<()> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs).await?;
    let (signature, version, mechanism) = ([theirs[0], theirs[9]], theirs[10], &theirs[12..17]);
    if signature != [0xff, 0x7f] || version < 3 || mechanism != b"NULL\0" {
        return Err(refused("the peer does not speak ZMTP 3 without security"));
    }
    let mut ready = BytesMut::new();
    property(&mut ready, b"Socket-Type", kind.name());
    if kind == SocketKind::Route {
        property(&mut ready, b"Identity", b"");
    }
    stream.write_all(&command(b"READY", &ready)).await?;
    let theirs = read_frame(stream).await?;
    let properties = theirs.body.strip_prefix(b"\x05READY").filter(|_| theirs.command);
    match properties.and_then(|properties| find(properties, b"Socket-Type")) {
        Some(peer) if kind.peers().contains(&peer) => Ok(()),
        _ => Err(refused("the peer's socket is of the wrong type")),
    }
}

fn refused(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// Returns the greeting: signature, version 3.1, mechanism NULL.
fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[0] = 0xff;
    bytes[9..12].copy_from_slice(&[0x7f, 3, 1]);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn property(out: &mut BytesMut, name: &[u8], value: &[u8]) {
    out.put_u8(name.len() as u8);
    out.put_slice(name);
    out.put_u32(value.len() as u32);
    out.put_slice(value);
}

/// Returns the value of a property. Names are case-insensitive.
fn find<'a>(mut properties: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    while let Some((&len, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(len))?;
        let (size, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*size) as usize)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        properties = rest;
    }
    None
}

/// Reads a frame. It is not cancel-safe: a partly read frame is lost.
pub(crate) async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> Result<Frame> {
    let flags = stream.read_u8().await?;
    let len = if flags & LONG == 0 { u64::from(stream.read_u8().await?) } else { stream.read_u64().await? };
    if flags & !(MORE | LONG | COMMAND) != 0 || len > MAX_FRAME {
        return Err(refused("the peer sends what nobody asked for"));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).await?;
    Ok(Frame { command: flags & COMMAND != 0, more: flags & MORE != 0, body: body.into() })
}

/// Encodes the frames of a message.
pub(crate) fn message(frames: &[&[u8]]) -> Bytes {
    let mut out = BytesMut::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (index, frame) in frames.iter().enumerate() {
        put_frame(&mut out, if index + 1 < frames.len() { MORE } else { 0 }, frame);
    }
    out.freeze()
}

/// Encodes a command.
pub(crate) fn command(name: &[u8], data: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(1 + name.len() + data.len());
    body.put_u8(name.len() as u8);
    body.put_slice(name);
    body.put_slice(data);
    let mut out = BytesMut::with_capacity(body.len() + 9);
    put_frame(&mut out, COMMAND, &body);
    out.freeze()
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.put_slice(&[flags, len]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

/// Request of a peer to a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Subscribe(Bytes),
    Cancel(Bytes),
    /// Answer to a heartbeat, already encoded.
    Pong(Bytes),
    Nothing,
}

impl Wish {
    pub(crate) fn from_frame(frame: &Frame) -> Self {
        let body = &frame.body;
        if !frame.command {
            return match body.first() {
                Some(1) => Self::Subscribe(body.slice(1..)),
                Some(0) => Self::Cancel(body.slice(1..)),
                _ => Self::Nothing,
            };
        }
        let after = |name: &[u8]| body.starts_with(name).then(|| body.slice(name.len()..));
        if let Some(topic) = after(b"\x09SUBSCRIBE") {
            Self::Subscribe(topic)
        } else if let Some(topic) = after(b"\x06CANCEL") {
            Self::Cancel(topic)
        } else if let Some(ping) = after(b"\x04PING") {
            // A PING has a time to live, which only matters to the peer, and a context, which the answer repeats.
            Self::Pong(command(b"PONG", ping.get(2..).unwrap_or_default()))
        } else {
            Self::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_are_read_as_they_are_written() {
        let long = vec![7; 300];
        let written = message(&[b"", b"topic", &long]);
        assert_eq!(written[..10], [MORE, 0, MORE, 5, b't', b'o', b'p', b'i', b'c', LONG]);
        let mut stream = &written[..];
        for (body, more) in [(&b""[..], true), (b"topic", true), (&long, false)] {
            let frame = read_frame(&mut stream).await.unwrap();
            assert_eq!(frame, Frame { command: false, more, body: Bytes::copy_from_slice(body) });
        }
        let mut endless: &[u8] = &[LONG, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0];
        assert!(read_frame(&mut endless).await.is_err(), "nobody makes us keep that much");
    }

    #[tokio::test]
    async fn only_fitting_peers_are_taken() {
        for (kind, peer, fits) in [
            (SocketKind::Publish, &b"SUB"[..], true),
            (SocketKind::Publish, b"PULL", false),
            (SocketKind::Route, b"DEALER", true),
        ] {
            let (mut ours, mut theirs) = tokio::io::duplex(1024);
            let mut ready = BytesMut::new();
            property(&mut ready, b"socket-type", peer);
            theirs.write_all(&[&greeting()[..], &command(b"READY", &ready)].concat()).await.unwrap();
            assert_eq!(handshake(&mut ours, kind).await.is_ok(), fits);
        }
        let (mut ours, mut theirs) = tokio::io::duplex(1024);
        theirs
            .write_all(b"GET / HTTP/1.1\r\nhost: a.example.org\r\naccept: text/html, text/plain\r\n\r\n")
            .await
            .unwrap();
        assert!(handshake(&mut ours, SocketKind::Publish).await.is_err());
    }

    #[test]
    fn subscriptions_come_in_two_forms_and_heartbeats_are_answered() {
        let wish = |command, body: &'static [u8]| Wish::from_frame(&Frame { command, more: false, body: body.into() });
        assert_eq!(wish(false, b"\x01kv"), Wish::Subscribe("kv".into()));
        assert_eq!(wish(false, b"\x00kv"), Wish::Cancel("kv".into()));
        assert_eq!(wish(true, b"\x09SUBSCRIBEkv"), Wish::Subscribe("kv".into()));
        assert_eq!(wish(true, b"\x06CANCEL"), Wish::Cancel("".into()));
        assert_eq!(wish(true, b"\x04PING\x00\x0actx"), Wish::Pong(command(b"PONG", b"ctx")));
        assert_eq!(wish(true, b"\x05READY"), Wish::Nothing);
    }
}
