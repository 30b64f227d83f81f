//! Config and checkpoint to Program and weights; the catalog and the hub.
