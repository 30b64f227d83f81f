//! The parts of a body that messages are made from, which errors name.

use serde_json::Value;

/// A part of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Keys and indices that lead from the body to the part.
    path: Vec<String>,
    /// The key of the content of its message; `None` if the part is the content.
    content: Option<&'static str>,
}

impl Place {
    /// The part at `path`, which has the content of its message under the key `content`.
    pub(crate) fn new<const N: usize>(path: [&str; N], content: &'static str) -> Self {
        Self { path: path.map(str::to_owned).into(), content: Some(content) }
    }

    /// A field that is the content of its message.
    pub(crate) fn content(field: &str) -> Self {
        Self { path: vec![field.to_owned()], content: None }
    }

    /// The message of this index.
    pub(crate) fn message(index: usize) -> Self {
        Self::new(["messages", &index.to_string()], "content")
    }

    /// A part within this one.
    pub(crate) fn within<const N: usize>(&self, path: [&str; N], content: &'static str) -> Self {
        let path = self.path.iter().cloned().chain(path.map(str::to_owned)).collect();
        Self { path, content: Some(content) }
    }

    /// The keys and indices of a field of the message, such as `.content[0].text`.
    pub(crate) fn location(&self, field: &str) -> Vec<String> {
        let mut location = self.path.clone();
        for (index, part) in field.split(['.', '[', ']']).filter(|part| !part.is_empty()).enumerate() {
            match self.content {
                content if index == 0 && part == "content" => location.extend(content.map(str::to_owned)),
                _ => location.push(part.to_owned()),
            }
        }
        location
    }
}

/// Messages that are made from parts of a body, each with its place.
#[derive(Debug, Default)]
pub(crate) struct PlacedMessages {
    pub(crate) messages: Vec<Value>,
    pub(crate) places: Vec<Place>,
}

impl PlacedMessages {
    /// Adds a message.
    pub(crate) fn push(&mut self, message: Value, place: Place) {
        self.messages.push(message);
        self.places.push(place);
    }

    /// Says where the messages were made from that have no place yet.
    pub(crate) fn place_rest(&mut self, place: &Place) {
        self.places.resize(self.messages.len(), place.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_located_in_the_part() {
        let located = |place: Place, field: &str| place.location(field).join(".");
        assert_eq!(located(Place::message(2), ""), "messages.2");
        assert_eq!(located(Place::message(2), ".content[0].image_url.url"), "messages.2.content.0.image_url.url");
        assert_eq!(located(Place::content("system"), ".content[1].type"), "system.1.type");
        assert_eq!(located(Place::new(["input", "3"], "output"), ".content[0]"), "input.3.output.0");
        let inner = Place::message(1).within(["content", "4"], "content");
        assert_eq!(located(inner, ".content[0].text"), "messages.1.content.4.content.0.text");
    }
}
