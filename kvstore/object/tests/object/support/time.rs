//! Dates in the three forms that S3 uses. The algorithm is Howard Hinnant's `civil_from_days`.

/// (year, month, day) of a day number since 1970.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day_of_year - (153 * month_index + 2) / 5 + 1)
}

fn clock(unix_s: i64) -> (i64, i64, i64) {
    let second = unix_s.rem_euclid(86_400);
    (second / 3600, second / 60 % 60, second % 60)
}

/// `2026-11-22T01:02:03.000Z`.
pub(crate) fn iso(unix_s: i64) -> String {
    let ((year, month, day), (hour, minute, second)) = (civil(unix_s.div_euclid(86_400)), clock(unix_s));
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.000Z")
}

/// `20261122T010203Z`, as in `x-amz-date`.
pub(crate) fn basic(unix_s: i64) -> String {
    iso(unix_s).replace(['-', ':'], "").replace(".000", "")
}

/// `Sun, 22 Nov 2026 01:02:03 GMT`.
pub(crate) fn http(unix_s: i64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let days = unix_s.div_euclid(86_400);
    let ((year, month, day), (hour, minute, second)) = (civil(days), clock(unix_s));
    let (name, month) = (DAYS[days.rem_euclid(7) as usize], MONTHS[month as usize - 1]);
    format!("{name}, {day:02} {month} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[test]
fn known_dates() {
    assert_eq!(iso(951_782_400), "2000-02-29T00:00:00.000Z");
    assert_eq!(basic(784_111_777), "19941106T084937Z");
    assert_eq!(http(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT", "the example of RFC 9110");
}
