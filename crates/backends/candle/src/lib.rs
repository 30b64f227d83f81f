//! The reference backend: every op in the plainest candle calls.
