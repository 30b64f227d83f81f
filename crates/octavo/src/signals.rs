//! SIGINT and SIGTERM for commands other than `serve`.

use std::future::Future;
use std::io;
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

/// Waits for either signal and returns its number. After the call, the signals no longer end the process by themselves.
/// It must be called on an async runtime.
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

/// Makes either signal end the process if it is the first process of a container, to which the kernel does not deliver
/// unhandled signals. Other processes end by default.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn end_first_process() -> io::Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let wait = move || {
        if let Ok(number) = runtime.block_on(async { io::Result::Ok(interrupted()?.await) }) {
            // The exit status by which shells report a signal.
            std::process::exit(128 + number);
        }
    };
    thread::Builder::new().name("octavo-signals".into()).spawn(wait)?;
    Ok(())
}
