//! Dates in prompts, for `strftime_now`.

use std::fmt::Write;

use jiff::ZonedDateTime;
use jiff::civil::DateTime;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// The local time, as in transformers: the time zone is that of `TZ` or of the system, or else UTC.
pub(super) fn local_time() -> DateTime {
    ZonedDateTime::now().datetime()
}

/// Implements C's `strftime` in English, for a time without a zone. Unknown directives are kept unchanged.
pub(super) fn strftime(time: DateTime, format: &str) -> String {
    let moment = Moment(time);
    let mut out = String::new();
    let mut rest = format;
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        let (padded, directive) = match after.strip_prefix('-') {
            Some(after) => (false, after),
            None => (true, after),
        };
        rest = match directive.chars().next() {
            Some(letter) if moment.write(letter, padded, &mut out) => &directive[letter.len_utf8()..],
            _ => {
                out.push('%');
                after
            }
        };
    }
    out.push_str(rest);
    out
}

struct Moment(DateTime);

impl Moment {
    /// Writes a directive. Returns `false` if it is unknown.
    fn write(&self, letter: char, padded: bool, out: &mut String) -> bool {
        let time = self.0;
        let (number, width) = match letter {
            'Y' => (i32::from(time.year()), 0),
            'y' => (i32::from(time.year()).rem_euclid(100), 2),
            'm' => (time.month().into(), 2),
            'd' => (time.day().into(), 2),
            'H' => (time.hour().into(), 2),
            'I' => ((i32::from(time.hour()) + 11) % 12 + 1, 2),
            'M' => (time.minute().into(), 2),
            'S' => (time.second().into(), 2),
            'j' => (time.date().day_of_year().into(), 3),
            'w' => (time.weekday().to_sunday_zero_offset().into(), 0),
            'u' => (time.weekday().to_monday_one_offset().into(), 0),
            'f' => (time.subsec_nanosecond() / 1000, 6),
            's' => return false,
            _ => return self.write_text(letter, out),
        };
        let width = if padded { width } else { 0 };
        let _ = write!(out, "{number:0width$}");
        true
    }

    fn write_text(&self, letter: char, out: &mut String) -> bool {
        let time = self.0;
        let month = MONTHS[usize::from(time.month().unsigned_abs()) - 1];
        let day = DAYS[usize::from(time.weekday().to_sunday_zero_offset().unsigned_abs())];
        let composed = match letter {
            'B' => return push(out, month),
            'b' | 'h' => return push(out, &month[..3]),
            'A' => return push(out, day),
            'a' => return push(out, &day[..3]),
            'p' => return push(out, if time.hour() < 12 { "AM" } else { "PM" }),
            'Z' | 'z' => return true,
            '%' => return push(out, "%"),
            'n' => return push(out, "\n"),
            't' => return push(out, "\t"),
            'e' => {
                let _ = write!(out, "{:2}", time.day());
                return true;
            }
            'F' => "Y-m-d",
            'T' | 'X' => "H:M:S",
            'R' => "H:M",
            'D' | 'x' => "m/d/y",
            'c' => "a b e H:M:S Y",
            _ => return false,
        };
        for part in composed.chars() {
            if part.is_ascii_alphabetic() {
                self.write(part, true, out);
            } else {
                out.push(part);
            }
        }
        true
    }
}

fn push(out: &mut String, text: &str) -> bool {
    out.push_str(text);
    true
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use jiff::Timestamp;
    use jiff::tz::TimeZone;

    use super::*;

    fn at(seconds: i64, format: &str) -> String {
        let time = Timestamp::from_second(seconds).unwrap();
        strftime(TimeZone::UTC.to_datetime(time), format)
    }

    #[test]
    fn known_moments() {
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S %j"), "Thursday 01 January 1970 00:00:00 001");
        assert_eq!(at(951_827_696, "%F %T %a %b %e %p %I %y"), "2000-02-29 12:34:56 Tue Feb 29 PM 12 00");
        assert_eq!(at(1_735_689_599, "%d %b %Y, %j %-H:%-M"), "31 Dec 2024, 366 23:59");
        assert_eq!(at(4_107_542_400, "%Y-%m-%d %u"), "2100-03-01 1");
        assert_eq!(at(1_700_000_000, "%c|%x|%X|%D|%R"), "Tue Nov 14 22:13:20 2023|11/14/23|22:13:20|11/14/23|22:13");
    }

    #[test]
    fn odd_formats_are_left_alone() {
        assert_eq!(at(0, "100%"), "100%");
        assert_eq!(at(0, "%% %Q %-Q %é"), "% %Q %-Q %é");
    }

    /// The variable of the process that prints its local time.
    const PRINTS: &str = "PRINT_LOCAL_TIME";

    #[test]
    fn the_zone_is_that_of_the_environment() {
        if std::env::var_os(PRINTS).is_some() {
            println!("<{}>", strftime(local_time(), "%F %R"));
            return;
        }
        let utc = || TimeZone::UTC.to_datetime(Timestamp::now());
        for (zone, minutes) in [("UTC", 0), ("XXX-5:30", 330), ("XXX+11", -660)] {
            let mut process = Command::new(std::env::current_exe().unwrap());
            process.args(["the_zone_is_that_of_the_environment", "--nocapture"]).env(PRINTS, "1").env("TZ", zone);
            let before = utc();
            let output = String::from_utf8(process.output().unwrap().stdout).unwrap();
            let is_local =
                |time: DateTime| output.contains(&strftime(time + jiff::Span::new().minutes(minutes), "<%F %R>"));
            assert!(is_local(before) || is_local(utc()), "{zone}: {output}");
        }
    }
}
