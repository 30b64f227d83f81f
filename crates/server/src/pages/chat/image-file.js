//! Files of images: recognised by their first bytes, as the server does, and made smaller if they are large.

import { Problem } from "./problem.js";

/** The media types that the server decodes. */
export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** The most pixels of an image that is sent. */
const MOST_PIXELS = 4 << 20;

/** The longest side of an image that was made smaller. Browsers have limits for a canvas. */
const MOST_SIDE = 8192;

/** The most bytes of a file that is sent as it is. */
const MOST_BYTES = 8 << 20;

/** The most bytes of a file that is read at all. */
const MOST_READ = 64 << 20;

const JPEG_QUALITY = 0.92;

/** The media type of a file's first bytes, or undefined. */
function typeOf(bytes) {
  const text = String.fromCharCode(...bytes);
  if (text.startsWith("\x89PNG\r\n\x1a\n")) return "image/png";
  if (text.startsWith("\xff\xd8\xff")) return "image/jpeg";
  if (/^RIFF[^]{4}WEBP/.test(text)) return "image/webp";
  if (/^GIF8[79]a/.test(text)) return "image/gif";
}

/**
 * The image of a file, ready to be sent: the file itself or, if it is large, a smaller JPEG of a JPEG and a smaller PNG of the rest.
 * Throws a Problem if the server could not decode it.
 */
export async function prepare(file) {
  if (file.size > MOST_READ) throw new Problem(`“${file.name}” has more than ${MOST_READ >> 20} MiB.`);
  const type = typeOf(new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  if (!type) throw new Problem(`“${file.name}” is not an image in the format PNG, JPEG, WebP or GIF.`);
  // A copy: the file may change.
  const blob = new Blob([await file.arrayBuffer()], { type });
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Problem(`“${file.name}” is damaged or too large for this browser.`);
  }
  const { width, height } = bitmap;
  try {
    if (width * height <= MOST_PIXELS && file.size <= MOST_BYTES) return blob;
    const scale = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height)), MOST_SIDE / Math.max(width, height));
    const smaller = await drawn(bitmap, scale, type === "image/jpeg" ? type : "image/png");
    if (!smaller) throw new Problem(`“${file.name}” is too large for this browser.`);
    return smaller;
  } finally {
    bitmap.close();
  }
}

/** A bitmap, scaled, as a file; null if the browser cannot. */
function drawn(bitmap, scale, type) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(bitmap.width * scale));
  canvas.height = Math.max(1, Math.floor(bitmap.height * scale));
  const context = canvas.getContext("2d");
  if (!context) return null;
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, type, JPEG_QUALITY));
}

/** The `data:` URL of a Blob. */
export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
