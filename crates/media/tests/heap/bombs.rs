//! Small files that claim much, contain much, or contain it many times. Decoding takes no more memory than the header of
//! a file allows, whatever the file contains.

use std::borrow::Cow;

use futures::future::join_all;
use octavo_media::decode::{Header, decode, inspect};
use octavo_media::{MediaError, MediaSettings, RgbImage};
use safetensors::SafeTensors;

use super::Heap;
use super::common::{data_url, load, loader, png, settings};

const LIMIT: u64 = 178_956_970;
const MIB: u64 = 1 << 20;

impl Heap {
    /// Decodes a file, and checks that the heap stays within what its header allows.
    fn decode(&mut self, file: &[u8]) -> Result<RgbImage, MediaError> {
        let header = inspect(file, LIMIT)?;
        self.start();
        let result = decode(file, &header, [255; 3]);
        assert!(self.peak() <= header.decoding_bytes() + MIB, "{header:?}: {} bytes", self.peak());
        result
    }
}

/// The compressed rows of a grey PNG image.
fn image_data(side: u32) -> Vec<u8> {
    let file = png(side, side, 0);
    let at = file.windows(4).position(|name| name == b"IDAT").unwrap();
    let length = u32::from_be_bytes(*file[at - 4..].first_chunk().unwrap()) as usize;
    file[at + 4..at + 4 + length].to_vec()
}

/// A grey PNG image with these chunks before its rows, and after them.
fn png_with(side: u32, before: &[([u8; 4], &[u8])], rows: &[u8], after: &[([u8; 4], &[u8])]) -> Vec<u8> {
    let mut file = vec![];
    let mut encoder = png::Encoder::new(&mut file, side, side);
    encoder.set_color(png::ColorType::Grayscale);
    let mut writer = encoder.write_header().unwrap();
    for (name, content) in before.iter().chain([&(*b"IDAT", rows)]).chain(after) {
        writer.write_chunk(png::chunk::ChunkType(*name), content).unwrap();
    }
    drop(writer);
    file
}

/// A frame of an animated PNG image: its number, side, offset, and time.
fn frame_control(number: u32, side: u32) -> Vec<u8> {
    let numbers = [number, side, side, 0, 0].map(u32::to_be_bytes).concat();
    [numbers, vec![0, 1, 0, 1, 0, 0]].concat()
}

fn chunk(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let padding = vec![0; content.len() % 2];
    [name.as_slice(), &(content.len() as u32).to_le_bytes(), content, &padding].concat()
}

/// The lossless chunk of a grey WebP image.
fn lossless(side: u32) -> Vec<u8> {
    let mut file = vec![];
    let pixels = vec![128; (side * side) as usize];
    image_webp::WebPEncoder::new(&mut file).encode(&pixels, side, side, image_webp::ColorType::L8).unwrap();
    let at = file.windows(4).position(|name| name == b"VP8L").unwrap();
    file.split_off(at)
}

/// An animated WebP image of frames with these sides and chunks, which are not blended.
fn animated_webp(canvas: u32, frames: &[(u32, &[u8])]) -> Vec<u8> {
    let three = |number: u32| number.to_le_bytes()[..3].to_vec();
    let side = three(canvas - 1);
    let mut chunks = chunk(b"VP8X", &[vec![2, 0, 0, 0], side.clone(), side].concat());
    chunks.extend(chunk(b"ANIM", &[0; 6]));
    for (side, image) in frames {
        let head = [vec![0; 6], three(side - 1), three(side - 1), vec![1, 0, 0, 2]].concat();
        chunks.extend(chunk(b"ANMF", &[&head, *image].concat()));
    }
    [b"RIFF".as_slice(), &(chunks.len() as u32 + 4).to_le_bytes(), b"WEBP", &chunks].concat()
}

/// A GIF image of this side, as the only frame, without the end of the file.
fn gif_frame(side: u16) -> Vec<u8> {
    let mut file = vec![];
    let mut encoder = gif::Encoder::new(&mut file, side, side, &[9, 9, 9, 200, 200, 200]).unwrap();
    let pixels = vec![1; usize::from(side) * usize::from(side)];
    let frame = gif::Frame { width: side, height: side, buffer: Cow::Owned(pixels), ..gif::Frame::default() };
    encoder.write_frame(&frame).unwrap();
    drop(encoder);
    assert_eq!(file.pop(), Some(b';'));
    file
}

#[tokio::test]
async fn only_the_first_frame_of_a_gif_file_is_decoded() {
    let mut heap = Heap::alone().await;
    let first = gif_frame(1000);
    let still = heap.decode(&[first.as_slice(), b";"].concat()).unwrap();
    let frame = first[first.windows(10).position(|at| at[..5] == *b",\0\0\0\0").unwrap()..].to_vec();
    // Many whole ones, and many that are larger than the canvas and hold no data.
    let larger = b",\0\0\0\0\xff\xff\xff\xff\0\x08\0".repeat(10_000);
    for frames in [frame.repeat(500), larger] {
        let file = [first.clone(), frames, vec![b';']].concat();
        assert!(heap.decode(&file).unwrap() == still);
    }
    // The first one is larger than the canvas.
    let mut file = gif_frame(1000);
    file[6..10].copy_from_slice(&[10, 0, 10, 0]);
    assert!(matches!(heap.decode(&file), Err(MediaError::Image(_))));
}

#[tokio::test]
async fn only_the_first_frame_of_an_animated_png_file_is_decoded() {
    let mut heap = Heap::alone().await;
    let (small, large) = (image_data(100), image_data(3000));
    let still = heap.decode(&png_with(100, &[], &small, &[])).unwrap();
    let control = [1000_u32.to_be_bytes(), [0; 4]].concat();
    let (first, frame) = (frame_control(0, 100), [0_u32.to_be_bytes().as_slice(), &large].concat());
    let before = [(*b"acTL", control.as_slice()), (*b"fcTL", &first)];
    for side in [100, 3000] {
        let next = frame_control(1, side);
        let after = [(*b"fcTL", next.as_slice()), (*b"fdAT", &frame)].repeat(200);
        assert_eq!(heap.decode(&png_with(100, &before, &small, &after)).unwrap(), still, "frames of {side}");
    }
    // The first frame of the file is the large one.
    assert!(matches!(heap.decode(&png_with(100, &before, &large, &[])), Ok(image) if image.width() == 100));
    let first = frame_control(0, 3000);
    let before = [(*b"acTL", control.as_slice()), (*b"fcTL", &first)];
    assert!(matches!(heap.decode(&png_with(100, &before, &large, &[])), Err(MediaError::Image(_))));
}

#[tokio::test]
async fn only_the_first_frame_of_an_animated_webp_file_is_decoded() {
    let mut heap = Heap::alone().await;
    let (small, large) = (lossless(100), lossless(3000));
    let still = heap.decode(&animated_webp(100, &[(100, &small)])).unwrap();
    assert!(still.data().iter().all(|value| *value == 128));
    for side in [100, 3000] {
        let mut frames = vec![(side, large.as_slice()); 500];
        frames[0] = (100, &small);
        assert_eq!(heap.decode(&animated_webp(100, &frames)).unwrap(), still, "frames of {side}");
        // The first frame is the large one.
        assert!(matches!(heap.decode(&animated_webp(100, &frames[1..])), Err(MediaError::Image(_))));
    }
}

#[tokio::test]
async fn compressed_chunks_beside_the_image_are_not_expanded() {
    let mut heap = Heap::alone().await;
    let (small, bomb) = (image_data(100), image_data(8000));
    let text = [b"name\0\0".as_slice(), &bomb].concat();
    let international = [b"name\0\x01\0\0\0".as_slice(), &bomb].concat();
    let chunks = [(*b"iCCP", text.as_slice()), (*b"zTXt", &text), (*b"iTXt", &international)];
    let still = heap.decode(&png_with(100, &[], &small, &[])).unwrap();
    assert_eq!(heap.decode(&png_with(100, &chunks, &small, &chunks)).unwrap(), still);
    // Many more rows than the header has.
    assert_eq!(heap.decode(&png_with(100, &[], &bomb, &[])).unwrap().width(), 100);
}

/// Where a file says how large it is, and what it says.
fn claims(file: &mut [u8], width: u16, height: u16) {
    let little = [width.to_le_bytes(), height.to_le_bytes()];
    match file[0] {
        b'G' => file[6..10].copy_from_slice(little.as_flattened()),
        b'R' if &file[12..16] == b"VP8X" => {
            file[24..26].copy_from_slice(&(width - 1).to_le_bytes());
            file[27..29].copy_from_slice(&(height - 1).to_le_bytes());
        }
        b'R' if &file[12..16] == b"VP8 " => file[26..30].copy_from_slice(little.as_flattened()),
        b'R' => {
            let alpha = file[24] & 0xf0;
            let size = (u32::from(width) - 1) | (u32::from(height) - 1) << 14;
            file[21..25].copy_from_slice(&size.to_le_bytes());
            file[24] |= alpha;
        }
        _ => {
            let frame = |mark: &[u8]| mark[0] == 0xff && matches!(mark[1], 0xc0..=0xc2);
            let at = file.windows(2).position(frame).unwrap();
            file[at + 5..at + 7].copy_from_slice(&height.to_be_bytes());
            file[at + 7..at + 9].copy_from_slice(&width.to_be_bytes());
        }
    }
}

#[tokio::test]
async fn a_header_that_lies_costs_no_more_than_it_claims() {
    let mut heap = Heap::alone().await;
    let goldens = include_bytes!("../../testdata/decode.safetensors");
    let goldens = SafeTensors::deserialize(goldens).unwrap();
    let files = goldens.names().into_iter().filter(|name| name.ends_with(".file") && !name.starts_with("png"));
    let mut refused = 0;
    for name in files {
        let original = goldens.tensor(name).unwrap().data().to_vec();
        for (width, height) in [(1, 1), (1, 3000), (3000, 1), (2000, 2000)] {
            let mut file = original.clone();
            claims(&mut file, width, height);
            match heap.decode(&file) {
                Ok(image) => assert_eq!(image.width() * image.height(), usize::from(width) * usize::from(height)),
                Err(error) => {
                    assert!(matches!(error, MediaError::Image(_)), "{name}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 20, "{refused}");
    // A PNG header has a checksum.
    for side in [1, 2000] {
        let file = png_with(side, &[], &image_data(50), &[]);
        assert_eq!(heap.decode(&file).is_ok(), side == 1);
    }
    let header = Header { width: 100, height: 100, ..inspect(&png(10, 10, 1), 0).unwrap() };
    assert!(decode(&png(10, 10, 1), &header, [0; 3]).is_err(), "another header than that of the file");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_wait_for_one_another() {
    let mut heap = Heap::alone().await;
    // 20 files of a few kilobytes become 27 MB of pixels each, and more while they are decoded.
    let settings = MediaSettings { decoding_bytes: 100 << 20, threads: 8, cache_bytes: 0, ..settings() };
    let loader = loader(settings);
    let bombs: Vec<_> = (0..20).map(|i| data_url(&png(3000, 3000, i))).collect();
    assert!(bombs[0].len() < 100_000, "{}", bombs[0].len());
    heap.start();
    for image in join_all(bombs.iter().map(|source| load(&loader, source))).await {
        image.unwrap();
    }
    assert!(heap.peak() < 150 * MIB, "{} MiB", heap.peak() / MIB);
}
