//! HTTP: OpenAI routes, server-sent events, limits and errors.
