//! Dates in prompts, for `strftime_now`.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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

/// A time in UTC, in the proleptic Gregorian calendar.
struct Moment {
    year: u64,
    /// Month from 1.
    month: usize,
    /// Day of the month from 1.
    day: u64,
    /// Day of the year from 1.
    day_of_year: u64,
    /// Day of the week; Sunday is 0.
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
    microsecond: u32,
}

impl Moment {
    fn new(since_epoch: Duration) -> Self {
        let seconds = since_epoch.as_secs();
        let days = seconds / 86_400;
        let mut year = 1970;
        let mut day = days;
        // Whole periods of 400 years come first, because a clock may be set to any time.
        year += day / 146_097 * 400;
        day %= 146_097;
        while day >= year_length(year) {
            day -= year_length(year);
            year += 1;
        }
        let day_of_year = day + 1;
        let mut month = 0;
        while day >= month_length(year, month) {
            day -= month_length(year, month);
            month += 1;
        }
        Self {
            year,
            month: month + 1,
            day: day + 1,
            day_of_year,
            // 1 January 1970 was a Thursday.
            weekday: ((days + 4) % 7) as usize,
            hour: seconds / 3600 % 24,
            minute: seconds / 60 % 60,
            second: seconds % 60,
            microsecond: since_epoch.subsec_micros(),
        }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_length(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn month_length(year: u64, month: usize) -> u64 {
    const LENGTHS: [u64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    LENGTHS[month] + u64::from(month == 1 && is_leap(year))
}

/// Implements C's `strftime` in UTC and English. Unknown directives are kept unchanged.
pub(super) fn strftime(time: SystemTime, format: &str) -> String {
    let moment = Moment::new(time.duration_since(UNIX_EPOCH).unwrap_or_default());
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

impl Moment {
    /// Writes a directive. Returns `false` if it is unknown.
    fn write(&self, letter: char, padded: bool, out: &mut String) -> bool {
        let hour12 = (self.hour + 11) % 12 + 1;
        let (number, width) = match letter {
            'Y' => (self.year, 0),
            'y' => (self.year % 100, 2),
            'm' => (self.month as u64, 2),
            'd' => (self.day, 2),
            'H' => (self.hour, 2),
            'I' => (hour12, 2),
            'M' => (self.minute, 2),
            'S' => (self.second, 2),
            'j' => (self.day_of_year, 3),
            'w' => (self.weekday as u64, 0),
            'u' => ((self.weekday as u64 + 6) % 7 + 1, 0),
            'f' => (u64::from(self.microsecond), 6),
            's' => return false,
            _ => return self.write_text(letter, out),
        };
        let width = if padded { width } else { 0 };
        let _ = write!(out, "{number:0width$}");
        true
    }

    fn write_text(&self, letter: char, out: &mut String) -> bool {
        let month = MONTHS[self.month - 1];
        let day = DAYS[self.weekday];
        let composed = match letter {
            'B' => return push(out, month),
            'b' | 'h' => return push(out, &month[..3]),
            'A' => return push(out, day),
            'a' => return push(out, &day[..3]),
            'p' => return push(out, if self.hour < 12 { "AM" } else { "PM" }),
            'Z' | 'z' => return true,
            '%' => return push(out, "%"),
            'n' => return push(out, "\n"),
            't' => return push(out, "\t"),
            'e' => {
                let _ = write!(out, "{:2}", self.day);
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
    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(UNIX_EPOCH + Duration::from_secs(seconds), format)
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
}
