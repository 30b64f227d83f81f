//! End-to-end tests through the socket.
