//! Line charts in SVG.

use std::fmt::{self, Write};

/// Size of the image in pixels.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 450.0;

/// Frame of the plot area in pixels.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 775.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 395.0;

/// Approximate number of intervals of a linear axis.
const INTERVALS: f64 = 5.0;

/// Number of ticks on a logarithmic axis from which only powers of ten have labels.
const LABELS: i32 = 9;

/// Maximum ratio of the largest to the smallest value on a logarithmic axis.
const LOG_SPAN: f64 = 1e6;

/// Relative difference below which values count as equal.
const LEAST_SPAN: f64 = 1e-9;

/// Colours of Okabe and Ito, which colour-blind readers can distinguish.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// Maximum number of points of a line that are marked.
pub(crate) const FEW_POINTS: usize = 40;

/// Radius of a marked point, in pixels.
const MARK: f64 = 3.0;

/// Approximate width of a character of the legend in pixels.
const LETTER: f64 = 7.0;

/// A line chart. Its `Display` output is an SVG document.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Title above the plot.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines in drawing order. A legend names several lines.
    pub lines: Vec<Line>,
}

/// An axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Label with quantity and unit.
    pub label: String,
    /// The scale.
    pub scale: Scale,
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear, from 0; no value is negative.
    FromZero,
    /// Linear, from about the smallest value.
    Fitted,
    /// Logarithmic, over at most six powers of ten. Smaller values are drawn at the low end.
    Logarithmic,
}

/// A line through points from left to right.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// The points `(x, y)`. Points that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

impl Axis {
    /// Creates an axis.
    pub fn new(label: &str, scale: Scale) -> Self {
        Self { label: label.to_owned(), scale }
    }
}

impl Chart {
    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.lines.iter().flat_map(Line::finite)
    }

    /// The axes with their grid, ticks and labels.
    fn write_axes(&self, f: &mut fmt::Formatter<'_>, x: &Ruler, y: &Ruler) -> fmt::Result {
        for Tick { value, label } in &x.ticks {
            let at = x.pixel(*value);
            writeln!(f, r##"<path d="M{at:.1} {TOP}V{BOTTOM}" stroke="#ddd"/>"##)?;
            writeln!(f, r#"<text x="{at:.1}" y="{}" text-anchor="middle">{label}</text>"#, BOTTOM + 18.0)?;
        }
        for Tick { value, label } in &y.ticks {
            let at = y.pixel(*value);
            writeln!(f, r##"<path d="M{LEFT} {at:.1}H{RIGHT}" stroke="#ddd"/>"##)?;
            writeln!(f, r#"<text x="{}" y="{:.1}" text-anchor="end">{label}</text>"#, LEFT - 8.0, at + 4.0)?;
        }
        writeln!(f, r##"<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#333"/>"##)?;
        let (across, down) = (f64::midpoint(LEFT, RIGHT), f64::midpoint(TOP, BOTTOM));
        let label = Escaped(&self.x.label);
        writeln!(f, r#"<text x="{across}" y="{}" text-anchor="middle">{label}</text>"#, HEIGHT - 14.0)?;
        let label = Escaped(&self.y.label);
        writeln!(f, r#"<text transform="translate(18 {down}) rotate(-90)" text-anchor="middle">{label}</text>"#)
    }

    fn write_legend(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut at, y) = (LEFT, TOP - 12.0);
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            writeln!(f, r#"<path d="M{at} {}h20" stroke="{colour}" stroke-width="2"/>"#, y - 4.0)?;
            writeln!(f, r#"<text x="{}" y="{y}">{}</text>"#, at + 26.0, Escaped(&line.name))?;
            at += 46.0 + LETTER * line.name.chars().count() as f64;
        }
        Ok(())
    }
}

impl fmt::Display for Chart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let x = Ruler::new(self.x.scale, self.points().map(|(x, _)| x), LEFT, RIGHT);
        let y = Ruler::new(self.y.scale, self.points().map(|(_, y)| y), BOTTOM, TOP);
        let font = r#"font-family="sans-serif" font-size="12""#;
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>"#
        )?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#)?;
        writeln!(f, r#"<text x="{LEFT}" y="26" font-size="15">{}</text>"#, Escaped(&self.title))?;
        self.write_axes(f, &x, &y)?;
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let pixels: Vec<(f64, f64)> = line.finite().map(|(a, b)| (x.pixel(a), y.pixel(b))).collect();
            let points: Vec<String> = pixels.iter().map(|(a, b)| format!("{a:.1},{b:.1}")).collect();
            let points = points.join(" ");
            writeln!(f, r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>"#)?;
            // A line of one point is invisible, and marks show that a line has few points.
            let marked = if pixels.len() <= FEW_POINTS { &pixels[..] } else { &[] };
            for (a, b) in marked {
                writeln!(f, r#"<circle cx="{a:.1}" cy="{b:.1}" r="{MARK}" fill="{colour}"/>"#)?;
            }
        }
        if self.lines.len() > 1 {
            self.write_legend(f)?;
        }
        writeln!(f, "</svg>")
    }
}

impl Line {
    /// Creates a line.
    pub fn new(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.to_owned(), points }
    }

    fn finite(&self) -> impl Iterator<Item = (f64, f64)> {
        self.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite())
    }
}

/// A tick of an axis.
#[derive(Debug)]
struct Tick {
    value: f64,
    label: String,
}

/// Maps values to pixels.
#[derive(Debug)]
struct Ruler {
    /// At least two ascending ticks, of which the first and the last are the ends of the axis.
    ticks: Vec<Tick>,
    scale: Scale,
    /// Positions of the ends in pixels.
    ends: (f64, f64),
}

impl Ruler {
    /// Creates a ruler for `values` between the pixels `from` and `to`.
    fn new(scale: Scale, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let logarithmic = scale == Scale::Logarithmic;
        let values = values.filter(|value| !logarithmic || *value > 0.0);
        let bounds = values.fold(None, |bounds: Option<(f64, f64)>, value| match bounds {
            None => Some((value, value)),
            Some((low, high)) => Some((low.min(value), high.max(value))),
        });
        let (low, high) = bounds.unwrap_or((1.0, 1.0));
        let ticks = match scale {
            Scale::FromZero => linear_ticks(0.0, high),
            Scale::Fitted => linear_ticks(low, high),
            Scale::Logarithmic => logarithmic_ticks(low.max(high / LOG_SPAN), high),
        };
        Self { ticks, scale, ends: (from, to) }
    }

    fn pixel(&self, value: f64) -> f64 {
        let (low, high) = (self.ticks[0].value, self.ticks[self.ticks.len() - 1].value);
        let place = |value: f64| if self.scale == Scale::Logarithmic { value.log10() } else { value };
        let share = (place(value.clamp(low, high)) - place(low)) / (place(high) - place(low));
        self.ends.0 + share * (self.ends.1 - self.ends.0)
    }
}

/// Ticks at multiples of 1, 2 or 5 times a power of ten that enclose the values.
fn linear_ticks(low: f64, high: f64) -> Vec<Tick> {
    let size = low.abs().max(high.abs()).max(1.0);
    let span = if high - low > LEAST_SPAN * size { high - low } else { size };
    let power = (span / INTERVALS).log10().floor();
    let (factor, power) = match span / INTERVALS / 10f64.powf(power) {
        factor if factor <= 1.0 => (1.0, power),
        factor if factor <= 2.0 => (2.0, power),
        factor if factor <= 5.0 => (5.0, power),
        _ => (1.0, power + 1.0),
    };
    let (step, decimals) = (factor * 10f64.powf(power), (-power).max(0.0) as usize);
    let first = (low / step).floor();
    let steps = ((high / step).ceil() - first).max(1.0) as u32;
    let values = (0..=steps).map(|index| (first + f64::from(index)) * step);
    values.map(|value| Tick { value, label: format!("{value:.decimals$}") }).collect()
}

/// Ticks at 1, 2 and 5 times the powers of ten that enclose the values, which are positive.
fn logarithmic_ticks(low: f64, high: f64) -> Vec<Tick> {
    let value = |index: i32| [1.0, 2.0, 5.0][index.rem_euclid(3) as usize] * 10f64.powf(f64::from(index.div_euclid(3)));
    let mut first = 3 * low.log10().floor() as i32;
    while value(first + 1) <= low {
        first += 1;
    }
    let mut last = first + 1;
    while value(last) < high {
        last += 1;
    }
    let label = |index: i32| {
        let decimals = (-index.div_euclid(3)).max(0) as usize;
        let is_labelled = last - first < LABELS || index.rem_euclid(3) == 0;
        if is_labelled { format!("{:.decimals$}", value(index)) } else { String::new() }
    };
    (first..=last).map(|index| Tick { value: value(index), label: label(index) }).collect()
}

/// Text that is escaped for XML.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '&' => f.write_str("&amp;")?,
                // XML cannot represent most of these characters.
                letter if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => f.write_char(' ')?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chart(scale: Scale, lines: &[&[(f64, f64)]]) -> Chart {
        let lines = lines.iter().map(|points| Line::new("a line", points.to_vec())).collect();
        Chart { title: "t".into(), x: Axis::new("x", scale), y: Axis::new("y", Scale::FromZero), lines }
    }

    /// The points of each line, in pixels; fails where the picture is not XML.
    fn pixels(chart: &Chart) -> Vec<Vec<(f64, f64)>> {
        let svg = chart.to_string();
        let document = roxmltree::Document::parse(&svg).unwrap();
        assert!(document.root_element().has_tag_name(("http://www.w3.org/2000/svg", "svg")));
        let lines = document.descendants().filter(|node| node.has_tag_name("polyline"));
        let point = |point: &str| {
            let (x, y) = point.split_once(',').unwrap();
            (x.parse().unwrap(), y.parse().unwrap())
        };
        lines.map(|line| line.attribute("points").unwrap().split_whitespace().map(point).collect()).collect()
    }

    fn texts(chart: &Chart) -> Vec<String> {
        let svg = chart.to_string();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts = document.descendants().filter(|node| node.has_tag_name("text"));
        texts.map(|node| node.text().unwrap_or_default().to_owned()).collect()
    }

    fn labels(ticks: &[Tick]) -> Vec<&str> {
        ticks.iter().map(|tick| tick.label.as_str()).collect()
    }

    #[test]
    fn points_lie_where_their_values_are() {
        let chart = chart(Scale::Fitted, &[&[(10.0, 0.0), (15.0, 50.0), (20.0, 100.0)], &[(10.0, 25.0)]]);
        let middle = (LEFT + RIGHT) / 2.0;
        let first = vec![(LEFT, BOTTOM), (middle, (TOP + BOTTOM) / 2.0), (RIGHT, TOP)];
        assert_eq!(pixels(&chart)[0], first);
        assert!((pixels(&chart)[1][0].1 - (BOTTOM - 0.25 * (BOTTOM - TOP))).abs() < 0.06, "rounded to a tenth");
    }

    #[test]
    fn equal_factors_are_equal_ways_on_a_logarithmic_axis() {
        let chart = chart(Scale::Logarithmic, &[&[(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)]]);
        let x: Vec<f64> = pixels(&chart)[0].iter().map(|point| point.0).collect();
        assert_eq!(x, [LEFT, (LEFT + RIGHT) / 2.0, RIGHT]);
    }

    #[test]
    fn what_a_logarithm_cannot_show_is_at_the_low_end() {
        let chart = chart(Scale::Logarithmic, &[&[(0.0, 1.0), (1e-12, 1.0), (1.0, 1.0)]]);
        assert_eq!(pixels(&chart)[0].iter().map(|point| point.0).collect::<Vec<_>>(), [LEFT, LEFT, RIGHT]);
    }

    #[test]
    fn ticks_are_round_and_enclose_the_values() {
        assert_eq!(labels(&linear_ticks(0.0, 100.0)), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(&linear_ticks(5.241, 5.273)), ["5.24", "5.25", "5.26", "5.27", "5.28"]);
        assert_eq!(labels(&linear_ticks(7.0, 7.0)), ["6", "8"]);
        assert_eq!(labels(&linear_ticks(0.0, 0.0)), ["0.0", "0.2"]);
        assert_eq!(labels(&logarithmic_ticks(0.3, 4.0)), ["0.2", "0.5", "1", "2", "5"]);
        assert_eq!(labels(&logarithmic_ticks(1.0, 1.0)), ["1", "2"]);
        let wide = logarithmic_ticks(1.0, 9999.0);
        assert_eq!(labels(&wide)[..4], ["1", "", "", "10"]);
    }

    #[test]
    fn few_points_are_marked() {
        let marks = |count: u32| {
            let points: Vec<_> = (0..count).map(|x| (f64::from(x), f64::from(x))).collect();
            chart(Scale::Fitted, &[&points]).to_string().matches("<circle ").count()
        };
        assert_eq!([marks(0), marks(1), marks(40), marks(41)], [0, 1, 40, 0]);
    }

    #[test]
    fn names_are_written_as_text() {
        let mut chart = chart(Scale::Fitted, &[&[(1.0, 1.0)], &[]]);
        chart.title = "a<b> & \"c\"\u{1}".into();
        chart.lines[1].name = "<nothing/>".into();
        let texts = texts(&chart);
        assert!(texts.contains(&"a<b> & \"c\" ".to_owned()) && texts.contains(&"<nothing/>".to_owned()), "{texts:?}");
    }

    #[test]
    fn one_line_needs_no_legend() {
        let mut chart = chart(Scale::Fitted, &[&[(1.0, 1.0)]]);
        assert!(!texts(&chart).contains(&"a line".to_owned()));
        chart.lines.push(chart.lines[0].clone());
        assert!(texts(&chart).contains(&"a line".to_owned()));
    }

    proptest! {
        #[test]
        fn any_values_make_a_picture_within_its_frame(
            points in prop::collection::vec((prop::num::f64::ANY, 0.0..1e12), 0..8),
            title in any::<String>(),
            scale in prop::sample::select(vec![Scale::Fitted, Scale::Logarithmic]),
        ) {
            // Beyond these no measurement has values.
            let is_sane = |x: f64| !x.is_finite() || x == 0.0 || (1e-30..1e30).contains(&x.abs());
            let points: Vec<_> = points.into_iter().filter(|(x, _)| is_sane(*x)).collect();
            let chart = Chart { title, ..chart(scale, &[&points]) };
            for (x, y) in &pixels(&chart)[0] {
                prop_assert!((LEFT..=RIGHT).contains(x) && (TOP..=BOTTOM).contains(y), "{x}, {y}");
            }
        }
    }
}
