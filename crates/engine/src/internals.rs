//! Doors for the benches; not part of the API.
