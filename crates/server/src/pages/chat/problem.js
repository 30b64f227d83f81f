//! Errors for the reader.

/** An error whose message is meant for the reader. */
export class Problem extends Error {}
