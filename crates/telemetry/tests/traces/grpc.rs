//! The same over gRPC: HTTP/2, each message behind five bytes.

use std::sync::mpsc;

use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::net::TcpListener;

use crate::receiver::Collected;

/// Bytes before a message: whether it is compressed, and its length.
const PREFIX: usize = 5;

pub fn over_grpc() -> Collected {
    let (send, exports) = mpsc::channel();
    let (bound, address) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            bound.send(listener.local_addr().unwrap()).unwrap();
            while let Ok((socket, _)) = listener.accept().await {
                let send = send.clone();
                tokio::spawn(async move {
                    let mut connection = h2::server::handshake(socket).await.unwrap();
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        assert_eq!(request.uri().path(), "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
                        assert_eq!(request.headers()["content-type"], "application/grpc");
                        tokio::spawn(answer(request.into_body(), respond, send.clone()));
                    }
                });
            }
        });
    });
    Collected { endpoint: format!("http://{}", address.recv().unwrap()), exports }
}

async fn answer(mut body: RecvStream, mut respond: SendResponse<Bytes>, send: mpsc::Sender<ExportTraceServiceRequest>) {
    let mut message = BytesMut::new();
    while let Some(Ok(data)) = body.data().await {
        body.flow_control().release_capacity(data.len()).unwrap();
        message.put(data);
    }
    assert_eq!(message[0], 0, "not compressed");
    if send.send(ExportTraceServiceRequest::decode(&message[PREFIX..]).unwrap()).is_err() {
        respond.send_reset(Reason::CANCEL);
        return;
    }
    let head = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut stream = respond.send_response(head, false).unwrap();
    stream.send_data(Bytes::from_static(&[0; PREFIX]), false).unwrap();
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    stream.send_trailers(trailers).unwrap();
}
