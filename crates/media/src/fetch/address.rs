//! Which addresses a connection may go to. Addresses that are not public may lead into the network of the server.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// The addresses that begin with the same bits, written `10.0.0.0/8`. Without a length, a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    /// Number of bits that are the same.
    length: u8,
}

/// A text is no [`Network`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a network such as 10.0.0.0/8")]
pub struct NetworkError(String);

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let bad = || NetworkError(text.to_owned());
        let (address, length) = text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let length = length.map_or(Ok(bits), |length| length.parse().map_err(|_| bad()))?;
        if length > bits { Err(bad()) } else { Ok(Self { address, length }) }
    }
}

impl Network {
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
            _ => return false,
        };
        differ >= self.length.into()
    }
}

/// Whether an address is public: not private, loopback, link-local, shared (RFC 6598), multicast, reserved or for
/// documentation. An IPv6 address that carries an IPv4 address is judged by it, or refused.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !matches!(
        (a, b, c),
        (0 | 10 | 127, _, _)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 0, 0 | 2)
            | (192, 88, 99)
            | (192, 168, _)
            | (198, 18 | 19, _)
            | (198, 51, 100)
            | (203, 0, 113)
            | (224..=255, _, _)
    )
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let s = address.segments();
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    if s[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
        // NAT64: the last 32 bits are the address that a translator connects to.
        return is_public_v4(Ipv4Addr::from((u32::from(s[6]) << 16) | u32::from(s[7])));
    }
    let global = s[0] & 0xe000 == 0x2000;
    // 2001::/23 has Teredo and other protocols, 2001:db8::/32 and 3fff::/20 are for documentation, 2002::/16 is 6to4.
    let special = matches!((s[0], s[1]), (0x2001, 0..=0x1ff | 0xdb8) | (0x2002, _) | (0x3fff, 0..=0xfff));
    global && !special
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_of_networks_are_not_public() {
        for address in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.8.8.8",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.9",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "5f00::1",
            "4000::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn addresses_of_the_internet_are_public() {
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.0.1",
            "198.20.0.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2001:4860:4860::8888",
            "2a00::1",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn a_network_contains_the_addresses_with_its_bits() {
        let contains = |network: &str, address: &str| {
            let network: Network = network.parse().unwrap();
            network.contains(address.parse().unwrap())
        };
        for (network, address) in [
            ("10.0.0.0/8", "10.255.0.1"),
            ("10.0.0.0/8", "::ffff:10.1.1.1"),
            ("127.0.0.1", "127.0.0.1"),
            ("fd00::/8", "fdff::1"),
            ("0.0.0.0/0", "169.254.169.254"),
        ] {
            assert!(contains(network, address), "{network} {address}");
        }
        for (network, address) in
            [("10.0.0.0/8", "11.0.0.1"), ("127.0.0.1", "127.0.0.2"), ("fd00::/8", "fe00::1"), ("0.0.0.0/0", "::1")]
        {
            assert!(!contains(network, address), "{network} {address}");
        }
        for text in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/-1", "host"] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_mapped_address_is_judged_like_the_address(address: u32) {
            let v4 = Ipv4Addr::from(address);
            let expected = is_public(v4.into());
            prop_assert_eq!(is_public(v4.to_ipv6_mapped().into()), expected);
            // The standard library knows some of the networks.
            if v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_documentation() {
                prop_assert!(!expected);
            }
        }
    }
}
