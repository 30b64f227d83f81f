//! Decoded pixels.

/// An RGB image of 8 bits per channel: rows from top to bottom, three bytes a pixel, no padding.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: usize,
    height: usize,
    data: Vec<u8>,
}

impl RgbImage {
    /// # Panics
    /// A side is zero, or `data` does not have `width * height * 3` bytes.
    #[must_use]
    pub fn from_raw(width: usize, height: usize, data: Vec<u8>) -> Self {
        assert!(width > 0 && height > 0, "an image has pixels");
        assert_eq!(data.len(), width * height * 3, "three bytes a pixel");
        Self { width, height, data }
    }

    /// Pixels of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// A copy of the rectangle of a width and height whose first pixel is at `left` and `top`. It lies within the image.
    pub(crate) fn cropped(&self, left: usize, top: usize, (width, height): (usize, usize)) -> Self {
        let mut data = Vec::with_capacity(width * height * 3);
        for row in self.data.chunks_exact(self.width * 3).skip(top).take(height) {
            data.extend_from_slice(&row[left * 3..(left + width) * 3]);
        }
        Self::from_raw(width, height, data)
    }

    /// All rows.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }
}

impl std::fmt::Debug for RgbImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RgbImage({}x{})", self.width, self.height)
    }
}
