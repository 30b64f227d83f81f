//! SIGINT and SIGTERM of commands that serve nobody.

use std::future::Future;
use std::io;
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

/// Waits for either signal and tells its number; from the call on, neither ends the process by itself. Must be called on
/// an async runtime.
///
/// # Errors
/// The handlers cannot be installed.
pub(crate) fn interrupted() -> io::Result<impl Future<Output = i32>> {
    let (interrupt, terminate) = (SignalKind::interrupt(), SignalKind::terminate());
    let (mut interrupts, mut terminates) = (signal(interrupt)?, signal(terminate)?);
    Ok(async move {
        tokio::select! {
            _ = interrupts.recv() => interrupt.as_raw_value(),
            _ = terminates.recv() => terminate.as_raw_value(),
        }
    })
}

/// Lets either signal end the process where it is the first one of a container: from that one the kernel keeps all
/// signals that it does not handle. Elsewhere they end it anyway.
///
/// # Errors
/// There can be no further thread.
pub(crate) fn end_first_process() -> io::Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let wait = move || {
        if let Ok(number) = runtime.block_on(async { io::Result::Ok(interrupted()?.await) }) {
            // As a shell tells a process that a signal has ended.
            std::process::exit(128 + number);
        }
    };
    thread::Builder::new().name("octavo-signals".into()).spawn(wait)?;
    Ok(())
}
