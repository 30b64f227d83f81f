//! The octavo command.
fn main() {}
