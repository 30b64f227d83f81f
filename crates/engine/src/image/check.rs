//! Checks of the images of a request.

use super::{ImageSpec, PromptImage};
use crate::SubmitError;

/// Checks that the images are in order, lie within a prompt of `prompt_tokens` tokens, fit the executor and can be
/// encoded within `budget` tokens.
pub(crate) fn check(
    images: &[PromptImage],
    prompt_tokens: usize,
    spec: Option<&ImageSpec>,
    budget: usize,
) -> Result<(), SubmitError> {
    if images.is_empty() {
        return Ok(());
    }
    let spec = spec.ok_or(SubmitError::NoImages)?;
    let limit = budget.min(spec.cache_tokens);
    let mut end = 0;
    for (index, image) in images.iter().enumerate() {
        let tokens = check_one(image, end, prompt_tokens, spec)
            .map_err(|reason| SubmitError::MalformedImage { number: index + 1, reason })?;
        if tokens > limit {
            return Err(SubmitError::ImageTooLarge { number: index + 1, tokens, limit });
        }
        end = image.span.end();
    }
    Ok(())
}

/// Checks an image whose predecessor ends at `before`, and returns its number of tokens.
fn check_one(image: &PromptImage, before: u32, prompt_tokens: usize, spec: &ImageSpec) -> Result<usize, &'static str> {
    let PromptImage { span, input, .. } = image;
    let exact = span.rows.checked_mul(span.cols).filter(|&tokens| tokens > 0).ok_or("its grid has no tokens")?;
    if span.start < before {
        return Err("it begins before the end of the image before it");
    }
    let end = span.start.checked_add(exact).filter(|&end| end as usize <= prompt_tokens);
    end.ok_or("its tokens lie beyond the prompt")?;
    let patches = |tokens: u32| tokens.checked_mul(spec.merge);
    if (patches(span.rows), patches(span.cols)) != (Some(input.rows), Some(input.cols)) {
        return Err("its patches do not match its tokens");
    }
    let bytes = |patch: usize| (input.rows as usize).checked_mul(input.cols as usize)?.checked_mul(patch);
    if ![spec.patch_bytes, spec.frame_bytes].iter().any(|&patch| bytes(patch) == Some((*input.patches).as_ref().len()))
    {
        return Err("its patches do not have the size of its grid");
    }
    Ok(exact as usize)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{ImageHash, ImageInput, ImageSpan};

    const SPEC: ImageSpec = ImageSpec { cache_tokens: 20, merge: 2, patch_bytes: 3, frame_bytes: 3, seen_whole: false };

    fn image(start: u32, rows: u32, cols: u32) -> PromptImage {
        let patches = vec![0; (rows * cols * 4 * 3) as usize];
        let input = Arc::new(ImageInput { rows: rows * 2, cols: cols * 2, patches: Box::new(patches) });
        PromptImage { span: ImageSpan { start, rows, cols }, hash: ImageHash([0; 32]), input }
    }

    fn message(images: &[PromptImage]) -> String {
        check(images, 30, Some(&SPEC), 12).unwrap_err().to_string()
    }

    #[test]
    fn images_in_order_within_the_prompt_are_accepted() {
        let images = [image(0, 3, 4), image(12, 1, 1), image(20, 2, 5)];
        assert_eq!(check(&images, 30, Some(&SPEC), 12), Ok(()));
        assert_eq!(check(&[], 30, None, 12), Ok(()));
    }

    #[test]
    fn defects_are_named() {
        assert_eq!(check(&[image(0, 1, 1)], 30, None, 12), Err(SubmitError::NoImages));
        let overlap = message(&[image(5, 2, 3), image(10, 1, 1)]);
        assert_eq!(overlap, "image 2 is malformed: it begins before the end of the image before it");
        assert_eq!(message(&[image(25, 2, 3)]), "image 1 is malformed: its tokens lie beyond the prompt");
        assert_eq!(message(&[image(0, 0, 3)]), "image 1 is malformed: its grid has no tokens");
        let mut other = image(0, 2, 3);
        other.span = ImageSpan { start: 0, rows: 3, cols: 2 };
        assert_eq!(message(&[other]), "image 1 is malformed: its patches do not match its tokens");
        let short = ImageInput { rows: 2, cols: 2, patches: Box::new([0u8; 11]) };
        let short = PromptImage { input: Arc::new(short), ..image(0, 1, 1) };
        assert_eq!(message(&[short]), "image 1 is malformed: its patches do not have the size of its grid");
        let large = message(&[image(0, 1, 1), image(1, 13, 1)]);
        assert_eq!(large, "image 2 takes 13 tokens, but at most 12 fit one image: send a smaller image");
        let cache = check(&[image(0, 7, 3)], 30, Some(&SPEC), 1000).unwrap_err();
        assert_eq!(cache, SubmitError::ImageTooLarge { number: 1, tokens: 21, limit: 20 });
    }

    proptest! {
        #[test]
        fn no_span_panics(spans in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>()), 0..4)) {
            let images: Vec<_> = spans
                .into_iter()
                .map(|(start, rows, cols)| PromptImage { span: ImageSpan { start, rows, cols }, ..image(0, 1, 1) })
                .collect();
            let accepted = check(&images, 30, Some(&SPEC), 12).is_ok();
            let fine = |image: &PromptImage| (image.span.rows, image.span.cols) == (1, 1) && image.span.start < 30;
            let ordered = images.windows(2).all(|pair| pair[0].span.end() <= pair[1].span.start);
            prop_assert_eq!(accepted, ordered && images.iter().all(fine));
        }
    }
}
