//! Pixels of other kinds as RGB, with Pillow's rounding.

/// Converts pixels of `N` bytes.
fn each<const N: usize>(pixels: &[u8], convert: impl Fn([u8; N]) -> [u8; 3]) -> Vec<u8> {
    let (pixels, _) = pixels.as_chunks::<N>();
    let mut rgb = vec![[0; 3]; pixels.len()];
    for (to, pixel) in rgb.iter_mut().zip(pixels) {
        *to = convert(*pixel);
    }
    rgb.into_flattened()
}

/// `x / 255`, rounded.
fn over_255(x: u32) -> u8 {
    let x = x + 128;
    ((x + (x >> 8)) >> 8) as u8
}

fn blend(colour: u8, alpha: u8, ground: u8) -> u8 {
    let alpha = u32::from(alpha);
    over_255(u32::from(colour) * alpha + u32::from(ground) * (255 - alpha))
}

/// Lays pixels of `[red, green, blue, alpha]` over a colour.
pub(super) fn over(pixels: &[u8], [red, green, blue]: [u8; 3]) -> Vec<u8> {
    each(pixels, |[r, g, b, alpha]| [blend(r, alpha, red), blend(g, alpha, green), blend(b, alpha, blue)])
}

/// Lays pixels of `[grey, alpha]` over a colour.
pub(super) fn grey_over(pixels: &[u8], background: [u8; 3]) -> Vec<u8> {
    each(pixels, |[grey, alpha]| background.map(|ground| blend(grey, alpha, ground)))
}

/// Grey values in all three channels.
pub(super) fn grey(values: &[u8]) -> Vec<u8> {
    each(values, |[grey]| [grey; 3])
}

/// Indices into a palette.
pub(super) fn palette(indices: &[u8], colours: &[[u8; 3]; 256]) -> Vec<u8> {
    each(indices, |[index]| colours[usize::from(index)])
}

/// Pixels of `[cyan, magenta, yellow, black]`, where 255 is full ink, as RGB.
pub(super) fn cmyk(pixels: &[u8]) -> Vec<u8> {
    each(pixels, |[cyan, magenta, yellow, black]| {
        let light = 255 - black;
        [cyan, magenta, yellow].map(|ink| light - over_255(u32::from(ink) * u32::from(light)))
    })
}
